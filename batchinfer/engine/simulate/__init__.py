"""An engine that computes nothing, on a clock that a roofline sets.

May import: config, engine.
"""
