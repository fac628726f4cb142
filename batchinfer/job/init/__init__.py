"""``batchinfer init``: a job file written for a dataset."""
