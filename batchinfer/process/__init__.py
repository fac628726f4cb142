"""The process of a job: signals, garbage collection, threads, and the cores to use."""
