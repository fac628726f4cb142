"""Formats values, tables, waits and progress for a terminal.

May import: near_names, engine.stats.
"""
