"""Threads that compute on a CPU: how many, why, and fewer while others use the cores.

May import: cpus, engine.runner, engine.step.
"""
