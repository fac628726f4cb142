"""Files of workers on their way to the output.

``access`` finds out where a worker's files go: to a disk that it shares with the driver, or to the
store.
``outbox`` collects a worker's reports. ``publisher`` puts the parts that workers have handed over
in their places. ``driver_log`` is the driver's own file.
"""
