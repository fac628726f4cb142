"""Data plane: tensors, the model, the KV pool."""
