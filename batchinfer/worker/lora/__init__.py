"""LoRA adapters: read, checked, added to what linear layers give.

May import: errors, engine.kv, worker.
"""
