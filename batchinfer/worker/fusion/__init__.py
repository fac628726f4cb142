"""Replaces modules and layers by faster modules with the same results."""
