"""Reads and checks the job file, and describes its keys to editors."""
