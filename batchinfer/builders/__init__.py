"""Builds engines from the scheduler and the worker, and engines that only simulate."""
