"""Decode steps captured once and replayed as CUDA graphs.

May import: kernels, engine.step, worker.attention, worker.kv_cache.
"""
