"""A model's folder: config, checkpoint, weights, tokenizer."""
