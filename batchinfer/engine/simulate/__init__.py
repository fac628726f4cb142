"""Runs the engine without a model, and estimates the times of its steps with a roofline model."""
