"""Client programs of vLLM, run on batchinfer and compared with transformers: ``make clients``."""
