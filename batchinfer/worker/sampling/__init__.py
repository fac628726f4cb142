"""Logits to tokens: processors, filters, draws, log-probabilities."""
