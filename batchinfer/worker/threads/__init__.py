"""Chooses CPU threads and their cores; fewer threads while other processes compute."""
