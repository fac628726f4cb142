"""A model's folder: config, checkpoint, weights, tokenizer.

May import: errors, engine.kv, worker.attention.
"""
