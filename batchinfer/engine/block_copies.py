"""The copies of whole blocks that a step begins with, as they are decided."""

from __future__ import annotations

from dataclasses import dataclass, field

Pairs = list[tuple[int, int]]
"""(source slot, destination slot)"""


@dataclass(slots=True)
class BlockCopies:
    """Done in this order, each list from its beginning: what leaves the device, what comes back,
    what is copied on the device."""

    outs: Pairs = field(default_factory=list)
    """From device slots to host slots."""
    ins: Pairs = field(default_factory=list)
    """From host slots to device slots."""
    within: Pairs = field(default_factory=list)
    """From device slots to device slots; a destination is nobody's source."""
