"""Structured output: grammars as text and compiled, JSON schemas and their validator.

``compiled_grammar`` makes the masks of allowed tokens, ``grammar_source`` writes grammars as text,
and ``json_schema`` rewrites schemas for grammars.
"""
