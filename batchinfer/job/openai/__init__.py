"""OpenAI batch files: reads requests, and writes responses and errors.

May import: config, errors, console, text, requests, builders, job.
"""
