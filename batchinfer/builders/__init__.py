"""Builds engines: real ones from the scheduler and the worker, or simulated ones."""
