"""Facts that identify a model: hashes of its files, or its commit on the hub."""
