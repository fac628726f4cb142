"""Calls: rows that somebody waits for the prompts of, and what they come to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchinfer.errors import DataError, JobError, ModelError, UsageError
from batchinfer.text.children import messages
from batchinfer.text.children.deaths import Death
from batchinfer.text.children.lots import Lot
from batchinfer.text.children.messages import Result
from batchinfer.text.children.processes import not_started

_MAX_OUTSIDE = 4
_REFUSALS = {kind.__name__: kind for kind in (UsageError, DataError, ModelError)}


@dataclass(eq=False, slots=True)
class Call:
    """Rows that are made into prompts; or, with one lot of no rows, a builder's columns."""

    recipe: bytes
    results: list[Result | None]
    lots: Iterator[Lot]
    again: deque[Lot] = field(default_factory=deque)
    """Those to be handed out before further ones of ``lots``."""
    num_out: int = 0
    """Lots that children have."""
    has_more: bool = True
    """Whether there may be lots that none has."""
    columns: tuple[str, ...] = ()
    error: JobError | RuntimeError | None = None
    arrived: list[tuple[Sequence[int], list[tuple[Any, ...]], bytes]] = field(default_factory=list)
    """Results that are still packed, and which rows' they are."""

    @property
    def is_over(self) -> bool:
        """Whether all its results are there, or will never be."""
        return self.error is not None or not (self.has_more or self.num_out)

    def next_lot(self) -> Lot | None:
        """A lot that no child has; None where there is none."""
        lot = self.again.popleft() if self.again else next(self.lots, None)
        self.has_more = lot is not None
        return lot

    def put_back(self, lot: Lot) -> None:
        """Have a lot handed out again, before all others."""
        self.again.appendleft(lot)
        self.has_more = True

    def take(self, lot: Lot, answer: tuple[Any, ...]) -> None:
        """What a child has answered about a lot."""
        if answer[0] == "rendered":
            lot.is_rendered = True
        elif answer[0] == "results":
            _, entries, ids = answer
            self.arrived.append((lot.done(len(entries)), entries, ids))
        elif answer[0] == "columns":
            self.columns = tuple(answer[1])
            lot.done(1)
        else:
            _, name, text = answer
            self.error = _REFUSALS[name](text)
            lot.done(len(lot.at))

    def take_death(self, lot: Lot, death: Death) -> None:
        """A child has died of the row that a lot is at."""
        if death.is_bug:
            self.error = RuntimeError(f"in a child process: {death.what}")
            return
        error = lot.verdict(death)
        if error is None:
            again = lot.after(death)
            if again.num_outside < _MAX_OUTSIDE:
                self.put_back(again)
            else:
                self.error = not_started(f"{death.outside}: {_MAX_OUTSIDE} times at one row")
        elif not lot.rows:
            self.error = ModelError(f"the model's chat template cannot be compiled: {error}")
        else:
            self.results[lot.at[lot.num_done]] = error
            rest = lot.rest(skipped=1)
            if rest.at:
                self.put_back(rest)

    def unpack(self) -> None:
        """Unpack what has arrived."""
        for at, entries, ids in self.arrived:
            for index, result in zip(at, messages.unpacked(entries, ids), strict=True):
                self.results[index] = result
        self.arrived.clear()

    def all_results(self) -> list[Result]:
        """Those of a call that is over."""
        results = [result for result in self.results if result is not None]
        if len(results) < len(self.results):
            raise RuntimeError("a row was never handed to a child process, or its result is lost")
        return results
