"""Encoders: models that read whole texts. Loads them, runs packed texts, pools hidden states.

May import: config, errors, console, kernels, engine, worker.
"""
