"""A schedule to the arrays of a step, and its result back to the sequences.

May import: protocols, engine.
"""
