"""An engine put together from the control plane and the worker, or simulated.

May import: config, process, errors, console, engine, text, worker.
"""
