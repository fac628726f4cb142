"""Requests whose image is lost fail; the outputs of other requests do not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batchinfer.engine.engine import Engine
from batchinfer.engine.images import Image, LostImageError, PromptImage
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.runner import Ready
from batchinfer.engine.step import Step
from tests.engine.fake import FakeRunner, expected, hashed, make_engine, make_request
from tests.engine.invariants import check_scheduler
from tests.engine.searches import assert_found, beams
from tests.engine.test_oom_recovery import SETUPS

LOST, KEPT = (Image(number, dict, 3) for number in (5, 6))


class Forgetful(FakeRunner):
    """Embeds the image ``LOST`` a few times, and then no longer finds it."""

    finds_lost = 0
    failures = 0

    def submit(self, step: Step) -> Ready:
        for each in step.images:
            if each.image is LOST and self.finds_lost == 0:
                self.failures += 1
                raise LostImageError(LOST.token_id, "the file is gone")
            self.finds_lost -= each.image is LOST
        return super().submit(step)


def seeing(request: Request, *images: Image) -> Request:
    """Return the request with images after its first token."""
    ids, placed, start = request.prompt_token_ids.copy(), [], 1
    for image in images:
        positions = np.arange(start, start + image.num_tokens, dtype=np.int32)
        ids[positions] = image.token_id
        placed.append(PromptImage(image, positions))
        start += image.num_tokens
    return replace(request, prompt_token_ids=ids, images=tuple(placed))


def workload() -> list[Request]:
    """Return rows with and without images, some with samples or beam searches."""
    rows = []
    for row in range(10):
        prompt = [row % 3 + 1] * (8 + row % 4)
        request = make_request(row, prompt, max_tokens=9, n=3 if row % 4 == 1 else 1)
        if row % 5 == 4:
            request = beams(row, prompt, 2, max_tokens=6)
        images = {0: [], 1: [LOST], 2: [KEPT], 3: [KEPT, LOST]}[row % 4]
        rows.append(seeing(request, *images))
    return rows


def run(engine: Engine, requests: list[Request]) -> dict[int, Completion]:
    for request in requests:
        engine.add_request(request)
    completions: list[Completion] = []
    for _ in range(1000):
        if not engine.num_unfinished:
            break
        completions += engine.step().completions
        check_scheduler(engine.scheduler)
    assert not engine.num_unfinished, "a row never ended"
    assert engine.scheduler.pool.num_used == engine.num_running == engine.num_waiting == 0
    done = {completion.request.row_id: completion for completion in completions}
    assert len(done) == len(completions) == len(requests)
    return done


@pytest.mark.parametrize("finds_lost", [0, 1, 2])
@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("setup", SETUPS)
def test_only_requests_that_need_the_image_fail(
    setup: str, runs_ahead: bool, finds_lost: int
) -> None:
    options: dict[str, Any] = {"num_blocks": 24, **SETUPS[setup]}
    engine, _ = make_engine(**options, runs_ahead=runs_ahead)
    windows, per_state = options.get("windows", (0,)), options.get("slots_per_state", 0)
    host_blocks = options.get("host_blocks", 0)
    runner = Forgetful(options["num_blocks"], 4, hashed, host_blocks, windows, per_state)
    engine._runner = runner
    runner.finds_lost = finds_lost
    done = run(engine, workload())
    failed = {row for row, completion in done.items() if completion.error_code is not None}
    needing = {row for row in done if row % 4 in (1, 3)}
    assert failed <= needing
    assert runner.failures >= 1
    assert failed == needing or finds_lost
    for row in failed:
        assert (done[row].error_code, done[row].error_message) == (
            "invalid_image",
            "the file is gone",
        )
    for row in done.keys() - failed:
        request = done[row].request
        if request.params.beam_width:
            assert_found(done[row])
            continue
        for output in done[row].outputs:
            assert output.token_ids.tolist() == expected(request, output.index)


def test_a_row_that_has_computed_the_image_goes_on() -> None:
    engine, _ = make_engine(100)
    runner = engine._runner = Forgetful(100, 4)
    runner.finds_lost = 1
    first, second = (
        seeing(make_request(row, [row + 1] * 8, max_tokens=6), LOST) for row in range(2)
    )
    engine.add_request(first)
    engine.step()
    engine.add_request(second)
    completions: list[Completion] = []
    while engine.num_unfinished:
        completions += engine.step().completions
    assert [(done.request.row_id, done.error_code) for done in completions] == [
        (1, "invalid_image"),
        (0, None),
    ]
    assert completions[1].outputs[0].token_ids.tolist() == expected(first, 0)
