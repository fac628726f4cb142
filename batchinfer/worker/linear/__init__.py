"""Linear layers, packed or quantized, and the choice of their GEMM kernel."""
