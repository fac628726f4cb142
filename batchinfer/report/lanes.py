"""Runs beside each other as lanes over time: who loaded a model, computed, waited, died."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from batchinfer.job.run_ids import writer_of
from batchinfer.job.shards.shard import shard_of
from batchinfer.job.stats.recorder import Run
from batchinfer.report.timeline import Float, Timeline

_ABSENT, _LOADS, _WAITS, _COMPUTES, _DIES = range(5)
_COLOURS = ("rule", "idle", "waste", "used", "again")
_KEY = (
    ("used", "computed"),
    ("waste", "waited"),
    ("idle", "loaded the model"),
    ("again", "died"),
)
"""Colours, and what they say."""
_DEATH_SLICES = 2
"""Slices of time that a death is drawn over: one could hardly be seen."""


@dataclass(frozen=True)
class Piece:
    """A stretch of a lane in one state."""

    colour: str
    share: float
    """Of the whole time."""


@dataclass(frozen=True)
class Lane:
    """One worker's time."""

    worker: str
    pieces: Sequence[Piece]
    rows: int
    busy: float
    """Share of the time with a model in which it computed."""
    state: str
    """In words, like ``ended``."""


def lanes_of(runs: Sequence[Run], timeline: Timeline, living: Set[str]) -> list[Lane]:
    """A lane for each writer of runs that were beside others, in the order they came.

    Args:
        runs: all of an output, in order; those that wrote alone have no lane.
        living: writers whose last run goes on.
    """
    if not timeline.span_s:
        return []
    writers = sorted({writer_of(run.run_id) for run in runs} - {""})
    lanes = [
        _lane(writer, [run for run in runs if writer_of(run.run_id) == writer], timeline, living)
        for writer in writers
    ]
    return [lane for _, lane in sorted(lanes, key=lambda found: found[0])]


def key(lanes: Sequence[Lane]) -> list[tuple[str, str]]:
    """The colours that are in some lanes, and what they say."""
    drawn = {piece.colour for lane in lanes for piece in lane.pieces}
    return [entry for entry in _KEY if entry[0] in drawn]


def _lane(
    writer: str, runs: Sequence[Run], timeline: Timeline, living: Set[str]
) -> tuple[float, Lane]:
    """A writer's lane, and when it came."""
    states = np.full(len(timeline.middles_s), _ABSENT)
    fates = ["running" if run is runs[-1] and writer in living else _end(run) for run in runs]
    busy_s = up_s = 0.0
    for run, fate in zip(runs, fates, strict=True):
        busy = timeline.busy_s.get(run.run_id, np.zeros(len(states)))
        _draw(states, run, busy, timeline, died=fate == "died")
        busy_s += float(busy.sum())
        up_s += run.engine_s
    shard = shard_of(writer)
    before = " (died before)" if "died" in fates[:-1] else ""
    lane = Lane(
        worker=writer if shard is None else f"shard {shard}",
        pieces=list(_pieces(states)),
        rows=sum(run.rows for run in runs),
        busy=min(1.0, busy_s / up_s) if up_s else 0.0,
        state=fates[-1] + before,
    )
    return timeline.began_s.get(runs[0].run_id, 0.0), lane


def _end(run: Run) -> str:
    return "failed" if run.error else "ended" if run.ended else "died"


def _draw(
    states: npt.NDArray[np.int_], run: Run, busy: Float, timeline: Timeline, *, died: bool
) -> None:
    """Write a run's states into its lane's slices of time."""
    middles, slice_s = timeline.middles_s, timeline.span_s / len(states)
    began = timeline.began_s.get(run.run_id, 0.0)
    ended = began + run.engine_s
    is_up = (middles >= began) & (middles < ended)
    if not is_up.any():  # shorter than a slice
        is_up[min(int(began / slice_s), len(states) - 1)] = True
    last = int(np.flatnonzero(is_up)[-1])
    states[(middles >= began - run.load_s) & (middles < began)] = _LOADS
    states[is_up] = np.where(busy[is_up] >= slice_s / 2, _COMPUTES, _WAITS)
    if died:
        states[max(0, last + 1 - _DEATH_SLICES) : last + 1] = _DIES


def _pieces(states: npt.NDArray[np.int_]) -> Iterator[Piece]:
    for state, slices in groupby(states.tolist()):
        yield Piece(_COLOURS[state], len(list(slices)) / len(states))
