"""OpenAI's batch files: requests in, responses and errors out.

May import: config, errors, console, text, requests, builders, job.
"""
