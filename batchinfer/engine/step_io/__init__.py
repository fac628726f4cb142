"""From a schedule to a step's arrays, and from its result to the sequences.

May import: protocols, engine.
"""
