"""Builds an engine from the control plane and the worker, or a simulated engine."""
