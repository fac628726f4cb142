"""Records of runs, and the summary and status of a job."""
