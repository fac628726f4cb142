"""A model's folder: config, checkpoint, weights, tokenizer; its body.

May import: errors, engine.kv, worker.attention.
"""
