"""Encoders: models that read whole texts. Loads them, runs packed texts, pools states.

May import: config, errors, console, kernels, engine, worker.
"""
