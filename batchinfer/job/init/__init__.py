"""``batchinfer init``: writes a job file for a dataset."""
