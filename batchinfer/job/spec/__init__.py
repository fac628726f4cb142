"""The job file: read, checked, described to editors."""
