"""OpenAI's batch files: requests in, responses and errors out.

May import: config, errors, console, text, requests, tool_choice, build, job.
"""
