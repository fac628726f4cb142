"""Loads encoders, which read whole texts, runs them on packed texts, and pools hidden states."""
