"""Modules and layers swapped for faster ones that compute the same.

May import: kernels, engine.kv, engine.step, worker.
"""
