"""Lanes of a report show the state of each worker over time."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.job.stats.run_record import Run
from batchinfer.report.lanes import Lane, key, lanes_of
from batchinfer.report.timeline import COLUMNS, Timeline
from tests.report.hostile import HOSTILE
from tests.report.pages import page_of

COLORS = {"rule": ".", "idle": "l", "waste": "w", "used": "c", "again": "X"}


def a_run(run_id: str, began: float, engine_s: float, load_s: float = 0.0, **facts: Any) -> Run:
    """Return a run whose engine lives for ``engine_s``; ``began`` is its start on the timeline."""
    return Run(
        run_id,
        {},
        load_s=load_s,
        total_s=load_s + engine_s,
        kv={"block_size": 16},
        rows=5,
        saved_at=began + engine_s,
        **facts,
    )


def timeline_of(span_s: float, **steps_of: list[tuple[float, float]]) -> Timeline:
    """Return a timeline with the steps of each writer's run.

    Args:
        steps_of: for each writer, (end on the run's clock, duration) of its steps, in seconds.
    """
    timeline = Timeline(span_s)
    for writer, steps in steps_of.items():
        run_id = f"run-00001-{writer}"
        ends, lasted = (np.array(column) for column in zip(*steps, strict=True))
        table = dict.fromkeys(COLUMNS, np.zeros(len(ends)))
        table |= {"t_s": ends, "step_ms": lasted * 1e3}
        timeline.add(table, 0.0, 0.0, 16, 1, run_id)
    return timeline


def drawn(lane: Lane, width: int = 24) -> str:
    """Return a lane as letters."""
    return "".join(COLORS[piece.color] * round(piece.share * width) for piece in lane.pieces)


def test_lane_shows_loading_waiting_computing_and_death() -> None:
    timeline = timeline_of(240.0, w01=[(60.0, 60.0), (120.0, 20.0), (240.0, 120.0)], w02=[(40, 40)])
    timeline.began_s = {"run-00001-w01": 0.0, "run-00001-w02": 0.0, "run-00001-w03": 200.0}
    runs = [
        a_run("run-00001-w01", 0.0, 240.0, ended=True),
        a_run("run-00001-w02", 0.0, 60.0),
        a_run("run-00001-w03", 200.0, 40.0, load_s=30.0),
    ]
    first, second, third = lanes_of(runs, timeline, living={"w03"})
    assert drawn(first) == "c" * 6 + "w" * 4 + "c" * 14
    assert re.fullmatch("cccc(w{1,2})X?[.]{18}", drawn(second))
    assert second.pieces[2].color == "again"
    assert drawn(third) == "." * 17 + "l" * 3 + "w" * 4
    assert dict(key([first])) == {"used": "computed", "waste": "waited"}
    assert [color for color, _ in key([third, second])] == ["used", "waste", "idle", "again"]
    assert [lane.state for lane in (first, second, third)] == ["ended", "died", "running"]
    assert [lane.busy for lane in (first, second, third)] == pytest.approx([200 / 240, 40 / 60, 0])


def test_worker_with_an_error_has_failed_and_not_died() -> None:
    runs = [
        a_run("run-00001-w01", 0.0, 10.0, ended=True, error="no memory"),
        a_run("run-00001-w02", 0.0, 10.0, ended=True),
    ]
    lanes = lanes_of(runs, Timeline(10.0), living=set())
    assert [lane.state for lane in lanes] == ["failed", "ended"]
    assert all(piece.color != "again" for lane in lanes for piece in lane.pieces)


def test_shard_that_runs_again_has_one_lane() -> None:
    timeline = Timeline(100.0)
    timeline.began_s = {"run-00001-s0001of4": 0.0, "run-00002-s0001of4": 50.0}
    runs = [a_run("run-00001-s0001of4", 0.0, 25.0), a_run("run-00002-s0001of4", 50.0, 50.0)]
    runs[1].ended = True
    (lane,) = lanes_of(runs, timeline, living=set())
    assert (lane.worker, lane.state, lane.rows) == ("shard 1/4", "ended (died before)", 10)


def test_run_that_wrote_alone_has_no_lane() -> None:
    assert not lanes_of([a_run("run-00001", 0.0, 10.0)], Timeline(10.0), set())
    assert not lanes_of([a_run("run-00001-w01", 0.0, 0.0)], Timeline(0.0), set())


@given(st.floats(0.1, 1e7), st.floats(0, 1.5), st.floats(0, 1.5), st.floats(0, 2), st.booleans())
def test_lane_covers_the_whole_time(
    span_s: float, began: float, lasted: float, load: float, ended: bool
) -> None:
    timeline = Timeline(span_s)
    timeline.began_s = {"run-00001-w01": began * span_s}
    run = a_run("run-00001-w01", began * span_s, lasted * span_s, load * span_s, ended=ended)
    (lane,) = lanes_of([run], timeline, living=set())
    assert sum(piece.share for piece in lane.pieces) == pytest.approx(1.0)
    assert ("again" in {piece.color for piece in lane.pieces}) == (not ended)


def test_workers_beyond_the_limit_are_counted() -> None:
    assert f"And {len(HOSTILE) - 40} more workers." in page_of("hostile")
    assert "more workers." not in page_of("plain")
