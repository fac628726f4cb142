"""Leases as they go to workers: rows of parts, under a fence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from batchinfer.job.row_ids import NO_ROWS, Part, RowIds

Ranges = tuple[range, ...]
"""Row ids, in order."""


@dataclass(frozen=True)
class Share:
    """Rows of one part, as a lease gives them to a worker."""

    part: Part
    rows: Ranges
    """To run; none where the part is only made of rows that others ran."""
    makes: bool
    """Whether the lease is to make the part."""


@dataclass(frozen=True)
class Lease:
    """Rows that one worker runs, and no other."""

    fence: int
    worker: str
    shares: tuple[Share, ...]
    """By part, in order."""

    @property
    def num_rows(self) -> int:
        """Rows to run; where a filter is, with those between them."""
        return sum(count_rows(share.rows) for share in self.shares)


def count_rows(ranges: Iterable[range]) -> int:
    """How many rows are in ``ranges``."""
    return sum(map(len, ranges))


def row_ids_of(ranges: Iterable[range]) -> RowIds:
    """The row ids in ``ranges``, which are in order."""
    return np.concatenate([NO_ROWS, *(np.arange(r.start, r.stop) for r in ranges)])
