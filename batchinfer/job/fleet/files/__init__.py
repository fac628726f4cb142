"""Files of workers on their way to the output.

``access`` finds out which way a worker's files go: over a disk that it shares with the driver, to
the store, or by the driver, where ``relay`` is the worker's side and ``inbox`` the driver's.
``outbox`` collects a worker's reports. ``publisher`` puts the parts that workers have handed over
in their places. ``driver_log`` is the driver's own file.
"""
