"""CPU threads: how many, on which cores, and fewer while other processes compute.

May import: process, kernels, engine.runner, engine.step.
"""
