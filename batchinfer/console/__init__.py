"""Values, tables, waits and progress as they are shown on a terminal.

May import: engine.stats.
"""
