"""Reads a model's folder: config, checkpoint, weights, tokenizer. Finds its body."""
