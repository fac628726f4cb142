"""Models that read texts whole and attend both ways: loaded, run packed, pooled.

May import: config, errors, console, kernels, engine, worker.
"""
