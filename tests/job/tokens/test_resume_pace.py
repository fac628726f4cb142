"""Interrupted rows are resumed in the right order, and the time of a step is estimated well."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchinfer.config import SamplingParams
from batchinfer.engine.stats import StepStats
from batchinfer.job.tokens.resume_pace import ResumePace, StepTimes
from batchinfer.requests.requests import PromptRow, RowSampling

STEP = StepStats(0, 0.0, step_ms=0.0, num_running=0, num_waiting=0)


def decode_step(sequences: int, seconds: float) -> StepStats:
    return replace(STEP, num_running=sequences, step_ms=1000 * seconds, decode_tokens=sequences)


def row(row_id: int, max_tokens: int = 10) -> PromptRow:
    prompt: Any = SimpleNamespace(token_ids=np.arange(3))
    return PromptRow(row_id, prompt, RowSampling(SamplingParams(max_tokens=max_tokens), False))


def test_rows_nearest_to_their_end_come_first_and_new_rows_last() -> None:
    kept = {1: 2, 2: 9, 3: 18}
    pace = ResumePace(lambda row_id: kept.get(row_id, 0), lambda: 0.0)
    rows = [row(0), row(1), row(2), row(3, max_tokens=20), row(4)]
    assert [one.row_id for one in pace.ordered(rows)] == [2, 3, 1, 0, 4]


def test_rows_with_the_answer_of_an_interrupted_row_follow_it() -> None:
    pace = ResumePace({3: 5}.get, lambda: 0.0)  # type: ignore[arg-type]
    rows = [row(0), row(1), row(2), row(3)]
    rows[1].key = rows[3].key = b"equal"
    assert [one.row_id for one in pace.ordered(rows)] == [3, 1, 0, 2]


def test_without_interrupted_rows_the_order_is_kept_and_all_rows_run() -> None:
    pace = ResumePace(lambda row_id: 0, lambda: 0.0)
    rows = [row(2), row(0), row(1)]
    assert pace.ordered(rows) is rows
    assert pace.num_ready(rows, num_running=100) == 3


def test_steps_with_few_and_many_sequences_give_the_time_of_any_step() -> None:
    times = StepTimes()
    for sequences in (10, 100) * 50:
        times = times.plus(decode_step(sequences, 0.5 + 0.01 * sequences))
    assert times.expected_s(50) == pytest.approx(1.0, rel=0.05)


def test_steps_of_one_size_are_assumed_to_have_a_fixed_share() -> None:
    times = StepTimes()
    for _ in range(3):
        times = times.plus(decode_step(100, 1.0))
    assert times.expected_s(100) == pytest.approx(1.0)
    assert times.expected_s(0) == pytest.approx(0.25)


def test_steps_without_sequences_have_no_slope() -> None:
    assert StepTimes().plus(decode_step(0, 1.0)).expected_s(100) == pytest.approx(0.625)


def test_tokens_of_prompts_cost_the_time_beyond_a_decode_step() -> None:
    times = StepTimes().plus(decode_step(10, 1.0))
    times = times.plus(replace(decode_step(10, 1.5), prefill_tokens=100))
    assert times.s_per_prefill_token == pytest.approx(0.005)
    assert times.expected_s(10) == pytest.approx(1.0)
