"""Tasks that turn hidden states into results: ``embed``, ``classify``."""
