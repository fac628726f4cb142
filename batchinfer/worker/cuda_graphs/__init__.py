"""Captures steps of a few sizes as CUDA graphs, and replays the graphs.

May import: kernels, engine.runner, engine.step, worker.
"""
