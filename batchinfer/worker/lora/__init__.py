"""LoRA adapters: read, checked, added to what linear layers give.

May import: errors, kernels, engine.kv, worker.
"""
