"""Tasks that make rows' results of hidden states: ``embed``, ``classify``."""
