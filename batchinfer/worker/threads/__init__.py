"""Threads that compute on a CPU: how many, on which cores, and fewer while other processes use
them.

May import: process, kernels, engine.runner, engine.step.
"""
