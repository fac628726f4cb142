"""Finished output once more, in folders by the values of columns (``output.partition_by``).

A copy, made of the finished parts as OpenAI's files are: what is missing or damaged is made again.

May import: errors, console, engine, text, job.
"""
