"""Draws tokens from logits: processors, filters, draws, log-probabilities.

May import: config, kernels, engine.step, worker.oom, worker.transfer.
"""
