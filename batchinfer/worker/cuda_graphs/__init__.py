"""Steps captured once for each of a few sizes and replayed as CUDA graphs.

May import: kernels, engine.runner, engine.step, worker.
"""
