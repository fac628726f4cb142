"""An engine that computes nothing, with times from a roofline model.

May import: config, engine.
"""
