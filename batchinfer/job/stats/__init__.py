"""What a run records of itself, and the numbers of a job."""
