"""Paged attention: one function for transformers' classes, and a backend for each device.

May import: errors, kernels, engine.kv, engine.step, worker.
"""
