"""The calls ``LLM.embed``, ``classify``, ``score`` and ``encode``."""
