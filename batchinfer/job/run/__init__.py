"""``batchinfer run``: four threads, the engine's loop, and what is said of it."""
