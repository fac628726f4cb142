"""Checkpoints whose weights were saved quantized: one class for each format behind ``Format``.

``choose_format`` reads config.json's ``quantization_config``, ``dequantized_tensors`` shows the
weight files as if they had been saved in floating point.
"""
