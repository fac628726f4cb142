"""The headline of each state of a job, and numbers in words."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from batchinfer.report.captions import outcome, progress
from batchinfer.report.report_data import RunFacts
from batchinfer.report.units import amount, moment, percent
from tests.report.pages import some_data

DONE: dict[str, Any] = {
    **{"rows_total": 2048, "rows_done": 2048, "rows_failed": 0},
    **{"wall_s": 7.3, "runs": ()},
}
HALF: dict[str, Any] = {"rows_total": 2048, "rows_done": 2047, "rows_failed": 3}


def a_run(name: str) -> RunFacts:
    return RunFacts(name, "cpu", 1024, 1.0, 3.5, 1e9, "ended")


@pytest.mark.parametrize(
    ("state", "facts", "headline", "tone"),
    [
        ("finished", DONE, "Finished: all 2,048 rows in 7.3 s", "good"),
        (
            "finished",
            {**DONE, "runs": [*map(a_run, ("run-00001", "run-00002-w01", "run-00002-w02"))]},
            "Finished: all 2,048 rows in 7.3 s, in 2 runs",
            "good",
        ),
        ("finished", {**DONE, "rows_total": 1}, "Finished: 1 row in 7.3 s", "good"),
        ("finished", {**DONE, "rows_total": 0}, "Finished: there were no rows", "good"),
        (
            "finished",
            {**DONE, "rows_failed": 2},
            "Finished with 2 errors: 2,046 of 2,048 rows answered",
            "good",
        ),
        (
            "finished with too many errors",
            {**DONE, "rows_failed": 32, "max_error_rate": 0.01},
            "Finished with 32 errors: 1.6% of 2,048 rows, more than the 1% that the job allows",
            "bad",
        ),
        ("stopped", HALF, "Stopped after 2,047 of 2,048 rows (99%)", "bad"),
        ("failed", HALF, "Failed after 2,047 of 2,048 rows (99%)", "bad"),
        (
            "running",
            {**HALF, "eta_s": 75.0},
            "Running: 2,047 of 2,048 rows (99%), about 1 min 15 s left",
            "used",
        ),
        (
            "running",
            {**HALF, "eta_s": 75.0, "eta_is_most": True},
            "Running: 2,047 of 2,048 rows (99%), at most 1 min 15 s left",
            "used",
        ),
        (
            "running",
            {**HALF, "phase": "loading the model, 3.0 s"},
            "Running: 2,047 of 2,048 rows (99%), loading the model, 3.0 s",
            "used",
        ),
        ("so far", {"rows_done": 1, "engine_s": 2.0}, "So far: 1 prompt in 2.0 s", "used"),
    ],
)
def test_headline_begins_with_the_outcome(
    state: str, facts: dict[str, Any], headline: str, tone: str
) -> None:
    found = outcome(replace(some_data(), state=state, **facts))
    assert (f"{found.word}{found.rest}", found.tone) == (headline, tone)


def test_headline_says_what_to_do() -> None:
    advice = {
        state: outcome(replace(some_data(), state=state, **HALF)).advice
        for state in ("stopped", "failed", "finished with too many errors", "finished")
    }
    continues = (
        "same command continues with the remaining 1 row; it keeps finished rows and drawn tokens."
    )
    assert advice["stopped"] == f"The {continues} 3 rows failed."
    assert advice["failed"] == f"Once the problem below is fixed, the {continues} 3 rows failed."
    assert "--retry-errors" in advice["finished with too many errors"]
    assert advice["finished"] == ""


def test_work_on_unfinished_rows_is_separate_from_finished_rows() -> None:
    running = replace(some_data(), state="running", rows_total=2048, rows_done=50)
    found = outcome(replace(running, rows_failed=1, share=0.23))
    assert f"{found.word}{found.rest}" == "Running: 50 of 2,048 rows (2%)"
    work = "23% of the work is done, unfinished rows included."
    assert found.advice == f"{work} 1 row failed."
    assert outcome(replace(running, rows_failed=0, share=0.025)).advice == ""


def test_progress_bar_shows_answered_failed_running_and_other_rows() -> None:
    found = replace(some_data(), rows_total=10, rows_done=6, rows_failed=1, share=0.75)
    shares = progress(found)
    assert [(name, share) for name, share, _ in shares] == [
        ("good", 0.5),
        ("bad", 0.1),
        ("used", pytest.approx(0.15)),
        ("rule", pytest.approx(0.25)),
    ]
    assert [title for *_, title in shares] == [
        *(
            "5 rows answered",
            "1 row failed",
            "work on running rows, counted in tokens",
            "4 not done",
        )
    ]
    assert sum(share for _, share, _ in progress(replace(found, share=None))) == pytest.approx(1)


@pytest.mark.parametrize(
    ("zone", "shown"),
    [
        ("UTC", "2026-11-22 20:54 UTC"),
        ("Europe/Berlin", "2026-11-22 21:54 UTC+01:00"),
        ("Asia/Kolkata", "2026-11-23 02:24 UTC+05:30"),
    ],
)
def test_times_name_their_zone(monkeypatch: pytest.MonkeyPatch, zone: str, shown: str) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert moment(1795380840.0) == shown
        assert (moment(0.0), moment(1e30)) == ("", "")
    finally:
        monkeypatch.undo()
        time.tzset()


def test_shares_are_not_rounded_to_nothing_or_all() -> None:
    shares = [0.0, 0.0001, 0.012, 0.5, 0.999, 1.0]
    assert [*map(percent, shares)] == ["0.0%", "under 0.1%", "1.2%", "50%", "over 99%", "100%"]
    assert [amount(count, "rows") for count in (0.0, 1.25, 3.0, 1234.5)] == [
        "0 rows",
        "1.2 rows",
        "3 rows",
        "1,234 rows",
    ]
