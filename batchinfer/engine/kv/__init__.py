"""The KV pool: blocks, who holds them, which can be reused, where they are."""
