"""How much of a CUDA device's memory the graphs of decode steps take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.engine.kv.layout import KVLayout, text_config
from batchinfer.worker.activations import LOGITS_COPIES, activation_elements
from batchinfer.worker.decode_graphs import batch_sizes

# Of an instantiated graph of some hundred kernels, by estimate.
_BYTES_PER_GRAPH = 8 * 2**20
# Most that the partial results of split contexts take (`kernels/decode_work.py`), for each window.
_WORKSPACE_BYTES = 2 * 256 * 2**20


def graph_bytes(
    layout: KVLayout, config: Mapping[str, Any], *, max_num_seqs: int, max_model_len: int
) -> int:
    """An upper estimate. All graphs share one pool of memory, as large as the largest needs."""
    logits = LOGITS_COPIES * int(text_config(config)["vocab_size"])
    elements = activation_elements(config) + logits
    tables = 4 * len(layout.windows) * max_num_seqs * layout.blocks_for(max_model_len)
    # Each batch size once with shared prefixes and once without.
    graphs = 2 * _BYTES_PER_GRAPH * len(batch_sizes(max_num_seqs))
    return max_num_seqs * elements * layout.element_bytes + tables + graphs + _WORKSPACE_BYTES
