"""Formats values, tables, waits and progress for a terminal."""
