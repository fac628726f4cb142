"""Time as it passed for whoever waited for a job whose runs were beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchinfer.job.run_ids import writer_of
from batchinfer.job.stats.recorder import Run


def wall_s(runs: Sequence[Run]) -> float:
    """Seconds in which a run was under way."""
    return _covered_s(runs, lambda run: run.total_s)


def engine_wall_s(runs: Sequence[Run]) -> float:
    """Seconds in which an engine was."""
    return _covered_s(runs, lambda run: run.engine_s)


def _covered_s(runs: Sequence[Run], lasted_s: Callable[[Run], float]) -> float:
    """Length of what the runs' times cover, each of which ended when the run was last saved.

    Runs that wrote alone were one after the other, whatever the clock said.
    """
    alone = sum(lasted_s(run) for run in runs if not writer_of(run.run_id))
    beside = [(run.saved_at - lasted_s(run), run.saved_at) for run in runs if writer_of(run.run_id)]
    covered, until = 0.0, float("-inf")
    for began, ended in sorted(beside):
        covered += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return alone + covered
