"""Rows of a query and a document to prompts, for rerankers.

``joined`` has those that the tokenizer joins, ``questions`` those that are asked in words.
"""
