"""Linear layers, packed or quantized, and the choice of their GEMM kernel.

May import: errors, console, kernels, engine.kv, worker.
"""
