"""Draws tokens from logits: processors, filters, draws, log-probabilities."""
