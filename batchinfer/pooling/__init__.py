"""Turns hidden states into embeddings and labels, as the model's folder describes."""
