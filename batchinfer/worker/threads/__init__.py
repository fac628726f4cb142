"""Chooses the number of CPU threads and their cores. Uses fewer threads while other processes keep
the cores busy."""
