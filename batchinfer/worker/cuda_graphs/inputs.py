"""Arrays that a captured decode step reads: always at the same place, of the same shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_PER_SEQUENCE = ("token_ids", "positions", "slot_mapping", "context_lens")
_TREE = ("order", "shared_lens")


class DecodeInputs:
    """Room for the arrays of up to ``max_num_seqs`` sequences that compute one token each.

    A step of fewer is padded with sequences that compute none: no attention is computed for them,
    and their KV goes nowhere (a slot mapping of -1). They stand last in the order of those that
    share prefixes, and share none since they do not decode.
    """

    def __init__(
        self, max_num_seqs: int, max_blocks: int, device: torch.device, num_groups: int = 1
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._tensors = {
            "token_ids": zeros(max_num_seqs),
            "positions": zeros(max_num_seqs),
            "slot_mapping": zeros(max_num_seqs),
            "context_lens": zeros(max_num_seqs, dtype=torch.int32),
            "query_starts": zeros(max_num_seqs + 1, dtype=torch.int32),
            "block_tables": zeros(max_num_seqs, max_blocks, dtype=torch.int32),
            "order": zeros(max_num_seqs, dtype=torch.int32),
            "shared_lens": zeros(max_num_seqs, dtype=torch.int32),
        }
        self._places = torch.arange(max_num_seqs, dtype=torch.int32, device=device)
        self._others = {
            "other_slots": zeros(num_groups - 1, max_num_seqs),
            "other_tables": zeros(num_groups - 1, max_num_seqs, max_blocks, dtype=torch.int32),
        }

    @property
    def max_blocks(self) -> int:
        """Most blocks of a sequence."""
        return self._tensors["block_tables"].shape[1]

    def load(self, tensors: Mapping[str, torch.Tensor], padded: int) -> None:
        """Copy a step's arrays in, and pad them to ``padded`` sequences. No sync."""
        count = len(tensors["context_lens"])
        for name in _PER_SEQUENCE:
            self._tensors[name][:count].copy_(tensors[name], non_blocking=True)
        tables = tensors["block_tables"]
        self._tensors["block_tables"][:count, : tables.shape[1]].copy_(tables, non_blocking=True)
        starts = self._tensors["query_starts"]
        starts[: count + 1].copy_(tensors["query_starts"], non_blocking=True)
        for name in _TREE:
            if name in tensors:
                self._tensors[name][:count].copy_(tensors[name], non_blocking=True)
        if len(self._others["other_slots"]):
            self._load_others(tensors, count, padded)
        if padded > count:
            self._tensors["slot_mapping"][count:padded].fill_(-1)
            starts[count + 1 : padded + 1].fill_(count)
            if "order" in tensors:
                self._tensors["order"][count:padded].copy_(self._places[count:padded])

    def _load_others(self, tensors: Mapping[str, torch.Tensor], count: int, padded: int) -> None:
        """Slots and tables of the layer groups after the first."""
        slots, tables = tensors["other_slots"], tensors["other_tables"]
        self._others["other_slots"][:, :count].copy_(slots, non_blocking=True)
        self._others["other_slots"][:, count:padded].fill_(-1)
        into = self._others["other_tables"][:, :count, : tables.shape[2]]
        into.copy_(tables, non_blocking=True)

    def of(self, padded: int) -> dict[str, torch.Tensor]:
        """Arrays of a step of ``padded`` sequences: views that stay where they are."""
        views = {name: tensor[:padded] for name, tensor in self._tensors.items()}
        views |= {name: tensor[:, :padded] for name, tensor in self._others.items()}
        return views | {"query_starts": self._tensors["query_starts"][: padded + 1]}
