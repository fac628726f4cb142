"""What structured output asks for: its grammars as text, JSON schemas and their validator.

``grammar_source`` is the door; ``json_schema`` says what each rewriting of a schema keeps.
"""
