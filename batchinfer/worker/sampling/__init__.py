"""Logits to tokens: processors, filters, draws, log-probabilities.

May import: kernels, engine.step, worker.oom, worker.transfer.
"""
