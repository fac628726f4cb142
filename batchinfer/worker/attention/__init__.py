"""Paged attention: one function for transformers' classes, and a backend for each device."""
