"""Replaces modules and layers with faster modules that compute the same results."""
