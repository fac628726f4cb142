"""Finds rows that other outputs hold already, by their keys, and copies them."""
