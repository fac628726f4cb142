"""Paged attention: a function that transformers' models call, and a backend for each device."""
