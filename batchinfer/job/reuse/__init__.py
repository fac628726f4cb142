"""Finds the rows that other outputs already hold, by their keys, and copies them."""
