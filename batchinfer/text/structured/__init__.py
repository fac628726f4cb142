"""Structured output: grammars as text, JSON schemas and their validator.

``grammar_source`` is the entry point; ``json_schema`` rewrites schemas for grammars.
"""
