"""Control plane: requests, sequences, blocks and steps. No torch, no text, no files."""
