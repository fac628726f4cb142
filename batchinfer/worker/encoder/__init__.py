"""Encoders: models that read whole texts. Loads them, runs packed texts, pools states."""
