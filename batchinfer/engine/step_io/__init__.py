"""Builds a step's arrays from a schedule, and applies its result to sequences."""
