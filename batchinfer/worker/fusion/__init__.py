"""Replaces modules and layers by faster modules with the same results.

May import: kernels, engine.kv, engine.step, worker.
"""
