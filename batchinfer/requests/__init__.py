"""Turns the prompts of rows into requests to the engine, for jobs and for the Python API.

``tool_choice`` constrains answers that must call a tool, and ``resampling`` draws samples until
enough samples pass.
"""
