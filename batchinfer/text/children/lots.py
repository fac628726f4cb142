"""Rows that a child does at a time, and what becomes of them when it dies."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from batchinfer.errors import RowError
from batchinfer.text.children.deaths import Death
from batchinfer.text.children.messages import Result
from batchinfer.text.row_values import MAX_ROW_BYTES, require_size

_MIN_ROWS, _MAX_ROWS = 8, 256
_MAX_BYTES = 1 << 17


@dataclass(slots=True)
class Lot:
    """Rows that one child does."""

    at: Sequence[int]
    """Which rows of the call."""
    rows: Sequence[bytes]
    alone: bool
    """Whether each is done by itself, and answered by itself."""
    fresh: bool = False
    """Whether by a child that has done nothing before."""
    num_done: int = 0
    is_patient: bool = False
    """Whether a row may take longer: a child had no time left at it, or at one before."""
    num_outside: int = 0
    """How often something else has kept a child from doing its first row."""
    is_rendered: bool = False
    """Of the row it is at, if that is done alone."""

    @property
    def is_done(self) -> bool:
        """Whether all its rows are."""
        return self.num_done == len(self.at)

    def done(self, count: int) -> Sequence[int]:
        """Count rows as done; which they are."""
        at = self.at[self.num_done : self.num_done + count]
        self.num_done += count
        self.is_rendered = False
        return at

    def unfinished(self) -> Lot:
        """Rows that are not done, to be done as they would have been."""
        return replace(
            self,
            at=self.at[self.num_done :],
            rows=self.rows[self.num_done :],
            num_done=0,
            is_rendered=False,
        )

    def rest(self, skipped: int = 0) -> Lot:
        """Rows that are not done, but the first ``skipped`` of them; each is to be done alone."""
        begin = self.num_done + skipped
        return Lot(self.at[begin:], self.rows[begin:], alone=True, fresh=True)

    def after(self, death: Death) -> Lot:
        """``rest`` where the row it is at is not to blame for its child's death."""
        rest = self.rest()
        if death.outside is not None:
            rest.num_outside = 1 if self.num_done else self.num_outside + 1
        rest.is_patient = death.is_out_of_time
        return rest

    def verdict(self, death: Death) -> RowError | None:
        """The error of the row it is at when its child dies; None where that proves nothing."""
        is_first = self.fresh and self.num_done == 0
        if not self.alone or not (death.is_certain or is_first):
            return None
        if death.outside is not None or (death.is_out_of_time and not self.is_patient):
            return None
        if self.is_rendered:
            return RowError("tokenizer_error", f"the tokenizer {death.what}")
        return RowError("template_error", f"the template {death.what}")


def lots_of(
    rows: Sequence[Mapping[str, object]], results: list[Result | None], num_lots: int
) -> Iterator[Lot]:
    """Rows as about ``num_lots`` lots, or fewer or more so that their size is reasonable; those
    that are too large have their error in ``results`` instead."""
    most_rows = min(max(_MIN_ROWS, -(-len(rows) // num_lots)), _MAX_ROWS)
    at: list[int] = []
    pickled: list[bytes] = []
    num_bytes = 0
    for index, row in enumerate(rows):
        try:
            data = _pickled(row)
        except RowError as error:
            results[index] = error
            continue
        if at and (len(at) == most_rows or num_bytes + len(data) > _MAX_BYTES):
            yield Lot(at, pickled, alone=len(at) == 1)
            at, pickled, num_bytes = [], [], 0
        at.append(index)
        pickled.append(data)
        num_bytes += len(data)
    if at:
        yield Lot(at, pickled, alone=len(at) == 1)


def _pickled(row: Mapping[str, object]) -> bytes:
    for name, value in row.items():
        require_size(value, name)
    try:
        data = pickle.dumps(row, pickle.HIGHEST_PROTOCOL)
    except (RecursionError, pickle.PicklingError, TypeError, AttributeError) as error:
        reason = f"a value that cannot be handed to another process: {error}"
        raise RowError("unsupported_content", reason) from error
    if len(data) > MAX_ROW_BYTES:
        raise RowError("row_too_large", f"its columns hold over {MAX_ROW_BYTES} bytes")
    return data
