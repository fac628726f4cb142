"""Ways in which families of models pair the elements that a rotary embedding rotates."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RotaryPairs:
    """Which elements are rotated together, and which columns have their cosines and sines."""

    adjacent: bool = False
    """True for pairs 2i and 2i + 1, False for i and i + R / 2."""
    by_pair: bool = False
    """True if column i has the angle of pair i, False if columns are those of elements."""
    halves: bool = False
    """True if cos and sin have R / 2 columns, one for each pair."""


PER_ELEMENT = RotaryPairs()
