"""Reads a model's folder: config, checkpoint, weights, tokenizer. Finds its body.

May import: config, errors, engine, worker.attention, worker.transfer.
"""
