"""Run a language model over a whole dataset, as many sequences at a time as memory allows."""
