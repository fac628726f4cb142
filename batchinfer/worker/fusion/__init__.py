"""Modules and layers swapped for faster ones that compute the same."""
