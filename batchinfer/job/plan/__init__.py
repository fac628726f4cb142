"""``batchinfer plan``: simulates a job before it runs."""
