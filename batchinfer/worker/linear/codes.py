"""The codes that a linear layer's plain weight was made of, kept beside it until it is packed.

A checkpoint of few bits is loaded as plain numbers, so that any device runs it and every check sees
numbers; with its codes beside them the layers are packed as they were saved, and not rounded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from batchinfer.kernels.float8_rows import Float8Rows
from batchinfer.kernels.low_bit import GroupedWeight, Int8Weight
from batchinfer.worker.linear.float8_weight import Float8Weight

HostCodes = Int8Weight | GroupedWeight | Float8Rows
"""What a CPU's kernels multiply by."""
Codes = HostCodes | Float8Weight
_NAME = "saved_codes"


@dataclass(frozen=True)
class KeptCodes:
    """Codes that are read when the layer is packed: they take no memory before."""

    kind: type[Codes]
    joins: object
    """What layers must have in common to be joined; None: it cannot be joined."""
    read: Callable[[], Codes]

    @classmethod
    def of(cls, weight: Codes, read: Callable[[], Codes] | None = None) -> KeptCodes:
        """Codes in memory, or those that ``read`` would read."""
        joins: object = type(weight)
        if isinstance(weight, GroupedWeight):
            joins = type(weight), weight.layout
        elif isinstance(weight, Float8Rows):
            joins = type(weight), weight.group_size
        elif isinstance(weight, Float8Weight) and not weight.can_be_joined:
            joins = None
        return cls(type(weight), joins, read or (lambda: weight))

    def __deepcopy__(self, memo: object) -> KeptCodes:
        return self  # nothing of it changes; a copied layer has the same codes


def keep_codes(linear: nn.Linear, codes: Codes | KeptCodes) -> None:
    """Keep the codes of a layer whose weight is ``dequantized()`` of them."""
    kept = codes if isinstance(codes, KeptCodes) else KeptCodes.of(codes)
    setattr(linear, _NAME, kept)


def codes_of(linear: nn.Linear) -> Codes | None:
    """Read what ``keep_codes`` has kept; None: nothing."""
    kept = _kept(linear)
    return None if kept is None else kept.read()


def join_codes(joined: nn.Linear, linears: Sequence[nn.Linear]) -> None:
    """Keep the codes of layers for one whose outputs are theirs, side by side.

    Where some have none, or others than the first, nothing is kept.
    """
    parts = [kept for linear in linears if (kept := _kept(linear)) is not None]
    kinds = {kept.joins for kept in parts}
    if len(parts) == len(linears) and len(kinds) == 1 and None not in kinds:
        keep_codes(joined, KeptCodes(parts[0].kind, parts[0].joins, partial(_joined, parts)))


def _joined(parts: Sequence[KeptCodes]) -> Codes:
    kind: Any = parts[0].kind
    weight: Codes = kind.joined([kept.read() for kept in parts])
    return weight


def _kept(linear: nn.Linear) -> KeptCodes | None:
    kept: KeptCodes | None = getattr(linear, _NAME, None)
    return kept
