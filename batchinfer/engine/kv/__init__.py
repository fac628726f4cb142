"""The KV pool: blocks, who holds them, which can be reused, where they are.

``block_pool`` is the door; a block's place in ``prefix_index`` says which tokens it holds.

May import: nothing of batchinfer.
"""
