"""Reads checkpoints with quantized weights; each format is a class that implements ``Format``.

``choose_format`` reads ``quantization_config`` of config.json. ``dequantized_tensors`` reads the
weight files as if their weights had been saved in floating point.
"""
