"""Builds the prompts of rerankers from a query and a document.

``joined`` lets the tokenizer join both, ``questions`` asks about them in words.
"""
