"""Rows' prompts to requests of the engine, for jobs and for the Python API.

``tool_choice`` holds rows that must call a tool to a grammar of calls; ``resampling`` draws samples
until enough of them pass.

May import: config, errors, engine, text.
"""
