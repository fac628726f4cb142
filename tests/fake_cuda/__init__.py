"""Runs the CUDA path without a GPU: tensors without contents, and kernels that only get checked."""
