"""The KV pool: blocks, references, prefix index, eviction, host slots.

The entry point is ``block_pool``. In ``prefix_index``, a block is keyed by its tokens.
"""
