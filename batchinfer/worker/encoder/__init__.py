"""Loads encoders, runs them on whole texts packed into one row, and pools their hidden states."""
