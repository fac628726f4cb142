"""The encoders' engine sorts texts, cuts steps and recovers from errors."""

from __future__ import annotations

import numpy as np
import pytest

from batchinfer.config import EMBEDDING
from batchinfer.engine.encoder_engine import EncoderEngine
from batchinfer.engine.encoder_step import EncoderStep
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.runner import OutOfMemory
from batchinfer.engine.step import Float32
from batchinfer.errors import DeviceError


class Sums:
    """A fake model that sums the tokens of each text; a step may have at most ``memory`` tokens."""

    def __init__(self, memory: int = 10**9) -> None:
        self.steps: list[list[int]] = []
        self.memory = memory

    def encode(self, step: EncoderStep) -> Float32:
        if step.num_tokens > self.memory:
            raise OutOfMemory("none left")
        self.steps.append(step.lengths.tolist())
        starts = np.cumsum(step.lengths) - step.lengths
        return np.add.reduceat(step.token_ids, starts)[:, None].astype(np.float32)


def request(row: int, length: int, pooling: str = "mean") -> Request:
    ids = np.full(length, row, np.int32)
    return Request(row, ids, EMBEDDING, (0, row), pools=True, pooling=(pooling,))


def engine(runner: Sums, most: int = 10) -> EncoderEngine:
    return EncoderEngine(runner, max_model_len=12, max_num_batched_tokens=most, max_num_seqs=4)


def run(one: EncoderEngine) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    while one.num_unfinished:
        done |= {each.request.row_id: each for each in one.step().completions}
    return done


def value(completion: Completion) -> float:
    return float(completion.hidden_state[0])


def test_texts_are_sorted_and_cut_by_their_tokens() -> None:
    runner, lengths = Sums(), [3, 12, 1, 5, 5, 1, 1, 1, 2]
    one = engine(runner)
    for row, length in enumerate(lengths):
        one.add_request(request(row, length))
    assert one.num_waiting == one.num_unfinished == len(lengths)
    done = run(one)
    assert runner.steps == [[12], [5, 5], [3, 2, 1, 1], [1, 1]]
    assert {row: value(each) for row, each in done.items()} == {
        row: row * length for row, length in enumerate(lengths)
    }
    assert {row: each.stats.prompt_tokens for row, each in done.items()} == dict(enumerate(lengths))


def test_poolings_are_not_mixed_in_a_step() -> None:
    runner = Sums()
    one = engine(runner)
    for row, pooling in enumerate(["mean", "cls", "mean"]):
        one.add_request(request(row, 2, pooling))
    assert len(run(one)) == 3
    assert runner.steps == [[2], [2, 2]]


def test_texts_that_cannot_run_are_returned() -> None:
    one = engine(Sums())
    for row, length in enumerate([0, 13, 12]):
        one.add_request(request(row, length))
    codes = {row: each.error_code for row, each in run(one).items()}
    assert codes == {0: "empty_prompt", 1: "prompt_too_long", 2: None}


def test_a_vector_with_nan_is_a_row_error() -> None:
    class Broken(Sums):
        def encode(self, step: EncoderStep) -> Float32:
            vectors = super().encode(step)
            vectors[0] = np.nan
            return vectors

    one = engine(Broken())
    for row in range(2):
        one.add_request(request(row, 3))
    assert [run_ := run(one), run_[0].error_code, run_[1].error_code][1:] == ["nan_logits", None]


def test_steps_get_smaller_when_memory_is_short() -> None:
    runner = Sums(memory=5)
    one = engine(runner, most=12)
    for row in range(6):
        one.add_request(request(row, 2))
    outcome = one.step()
    assert outcome.recovered.max_num_batched_tokens == 4
    assert len(run(one)) == 6
    assert runner.steps == [[2, 2]] * 3
    one.add_request(request(0, 6))
    with pytest.raises(DeviceError, match="one text of 6 tokens"):
        one.step()


def test_aborted_rows_leave_nothing_behind() -> None:
    one = engine(Sums())
    for length in (0, 3, 12):
        one.add_request(request(0, length))
    one.step()
    one.add_request(request(1, 0))
    one.abort_all()
    assert (one.num_unfinished, one.num_waiting) == (0, 0)
    assert one.step().stats is None
