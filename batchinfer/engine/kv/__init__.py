"""The KV pool: blocks, references, prefix index, eviction, host slots.

The entry point is ``block_pool``; a block's key in ``prefix_index`` is its tokens.
"""
