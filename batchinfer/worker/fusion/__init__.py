"""Replaces modules and layers with faster modules that have the same results."""
