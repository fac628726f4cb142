"""Reads a model's folder: its config, weights and tokenizer. Finds the model's body."""
