"""Makes a lane for each parallel worker: when it loaded, computed, waited and died."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchinfer.job.claims.writers import writer_named
from batchinfer.job.run_ids import writer_of
from batchinfer.job.stats.run_record import Run
from batchinfer.report.timeline import POINTS, Float, Timeline

_ABSENT, _LOADS, _WAITS, _COMPUTES, _DIES = range(5)
_COLORS = ("rule", "idle", "waste", "used", "again")
_KEY = {"used": "computed", "waste": "waited", "idle": "loaded the model", "again": "died"}
_DEATH_SLICES = 2
"""Number of slices of time that mark a death; one slice would hardly be visible."""


class Piece(NamedTuple):
    """A piece of a bar, with its share of the whole bar."""

    color: str
    share: float
    label: str = ""


@dataclass(frozen=True)
class Lane:
    worker: str
    pieces: Sequence[Piece]
    rows: int
    busy: float
    """Share of the time after loading the model in which the worker computed."""
    state: str
    """Final state in words, such as ``ended``."""


def lanes_of(runs: Sequence[Run], timeline: Timeline, living: Set[str]) -> list[Lane]:
    """Return a lane for each parallel writer, in the order of their starts.

    Args:
        runs: all runs of an output, in order. A run that was the only writer has no lane.
        living: writers whose last run is still running.
    """
    if not timeline.span_s:
        return []
    of_writer: dict[str, list[Run]] = {}
    for run in runs:
        of_writer.setdefault(writer_of(run.run_id), []).append(run)
    of_writer.pop("", None)
    starts = {writer: timeline.began_s.get(own[0].run_id, 0.0) for writer, own in of_writer.items()}
    writers = sorted(of_writer, key=lambda writer: (starts[writer], writer))
    return [_lane(writer, of_writer[writer], timeline, writer in living) for writer in writers]


def key(lanes: Sequence[Lane]) -> list[tuple[str, str]]:
    """Return the colors in the lanes, and their meanings."""
    drawn = {piece.color for lane in lanes for piece in lane.pieces}
    return [(color, meaning) for color, meaning in _KEY.items() if color in drawn]


def _lane(writer: str, runs: Sequence[Run], timeline: Timeline, is_living: bool) -> Lane:
    states = np.full(POINTS, _ABSENT)
    ends = ["failed" if run.error else "ended" if run.ended else "died" for run in runs]
    if is_living:
        ends[-1] = "running"
    busy_s = up_s = 0.0
    for run, end in zip(runs, ends, strict=True):
        busy = timeline.busy_s[run.run_id]
        _draw(states, run, busy, timeline, died=end == "died")
        busy_s += float(busy.sum())
        up_s += run.engine_s
    pieces = [(_COLORS[state], list(slices)) for state, slices in groupby(states.tolist())]
    return Lane(
        worker=_title(writer),
        pieces=[Piece(color, len(slices) / POINTS) for color, slices in pieces],
        rows=sum(run.rows for run in runs),
        busy=min(1.0, busy_s / up_s) if up_s else 0.0,
        state=ends[-1] + (" (died before)" if "died" in ends[:-1] else ""),
    )


def _title(name: str) -> str:
    writer = writer_named(name)
    return name if writer is None or writer.number is not None else str(writer)


def _draw(
    states: npt.NDArray[np.int_], run: Run, busy: Float, timeline: Timeline, *, died: bool
) -> None:
    """Write a run's states into its lane's slices of time."""
    middles, slice_s = (timeline.edges_s[1:] + timeline.edges_s[:-1]) / 2, timeline.span_s / POINTS
    began = timeline.began_s.get(run.run_id, 0.0)
    is_up = (middles >= began) & (middles < began + run.engine_s)
    if not is_up.any():  # the run was shorter than a slice
        is_up[min(int(began / slice_s), POINTS - 1)] = True
    last = int(np.flatnonzero(is_up)[-1])
    states[(middles >= began - run.load_s) & (middles < began)] = _LOADS
    states[is_up] = np.where(busy[is_up] >= slice_s / 2, _COMPUTES, _WAITS)
    if died:
        states[max(0, last + 1 - _DEATH_SLICES) : last + 1] = _DIES
