"""Chooses CPU threads and their cores; fewer threads while other processes compute.

May import: process, kernels, engine.runner, engine.step.
"""
