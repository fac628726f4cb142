"""Manages a job's process: signals, garbage collection, threads, and the cores to use."""
