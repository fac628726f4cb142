"""Chooses the sequences of each step: admission, preemption, blocks of running sequences."""
