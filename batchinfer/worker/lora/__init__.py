"""Reads and checks LoRA adapters, and adds their outputs to those of linear layers."""
