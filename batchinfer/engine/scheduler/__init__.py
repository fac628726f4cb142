"""Chooses the sequences of each step: admission, preemption, blocks of running sequences.

May import: engine.step, engine.request, engine.kv, engine.sequence, engine.stats.
"""
