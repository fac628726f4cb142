"""LoRA adapters: read, checked, added to what linear layers give."""
