"""Values, tables, waits and progress as they are shown on a terminal.

May import: near_names, engine.stats.
"""
