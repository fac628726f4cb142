"""Calls for vectors, labels and scores: ``LLM.embed``, ``classify``, ``score`` and ``encode``."""
