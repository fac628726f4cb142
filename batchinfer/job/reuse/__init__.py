"""Looks up the keys of rows to find rows that other outputs already hold, and copies these rows."""
