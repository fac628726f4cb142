"""LoRA adapters: reads and checks them, and adds them to the outputs of linear layers."""
