"""The KV pool: blocks, references, prefix index, eviction, host slots.

``block_pool`` is the door; a block's place in ``prefix_index`` says which tokens it holds.

May import: nothing of batchinfer.
"""
