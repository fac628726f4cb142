"""Threads that compute on a CPU: how many, on which cores, and fewer while others use them.

May import: process, kernels, engine.runner, engine.step.
"""
