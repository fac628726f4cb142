"""Replaces modules and layers by faster ones with the same results.

May import: kernels, engine.kv, engine.step, worker.
"""
