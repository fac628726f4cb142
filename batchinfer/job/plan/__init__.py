"""``batchinfer plan``: a job simulated before it runs."""
