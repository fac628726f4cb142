"""The job file: reads and checks it, and describes it to editors."""
