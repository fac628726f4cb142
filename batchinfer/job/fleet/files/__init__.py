"""Files of workers on their way to the output.

``access`` finds out which way a worker's files go. ``publisher`` puts the parts that workers have
handed over in their places. ``driver_log`` is the driver's own file.
"""
