"""Which preemption the scheduler chooses: swapping or recomputing."""

from __future__ import annotations

import pytest

from batchinfer.engine.kv.prefix_index import Block
from batchinfer.engine.scheduler.preemption import Preemption, PreemptionPolicy

SIZE = 16


def table(count: int, *, references: int = 1, on_host: int = 0) -> list[Block]:
    """Return blocks; the first ``on_host`` of them also have a host slot."""
    blocks = [Block(slot) for slot in range(count)]
    for at, block in enumerate(blocks):
        block.ref_count = references
        block.host_slot = at if at < on_host else -1
    return blocks


def measured(preemption: Preemption, block_copy_s: float, token_s: float) -> PreemptionPolicy:
    preemption_policy = PreemptionPolicy(preemption, block_copy_s)
    for _ in range(50):
        preemption_policy.observe(100 * token_s, prefill_tokens=90, decode_tokens=10)
    assert preemption_policy.token_s == pytest.approx(token_s, rel=1e-3)
    return preemption_policy


@pytest.mark.parametrize(("token_s", "swaps"), [(1e-3, True), (1e-5, False)])
def test_auto_chooses_the_faster_preemption(token_s: float, swaps: bool) -> None:
    """Copying a block out and back takes as long as computing 20 tokens at 1e-4 s each."""
    assert measured("auto", 1e-3, token_s).should_swap([table(9)], SIZE) == swaps


def test_blocks_already_on_the_host_cost_one_copy() -> None:
    # Computing a block takes as long as 1.6 copies.
    preemption_policy = measured("auto", 1e-3, 1e-4)
    assert not preemption_policy.should_swap([table(10)], SIZE)
    assert preemption_policy.should_swap([table(10, on_host=5)], SIZE)


def test_blocks_of_other_rows_cost_nothing_to_preempt() -> None:
    preemption_policy = measured("auto", 1e-3, 1e-4)
    shared = table(1000, references=2, on_host=1000)
    assert not preemption_policy.should_swap([shared + table(3)], SIZE)
    assert preemption_policy.should_swap([shared + table(3, on_host=3)], SIZE)


def test_blocks_that_a_group_shares_are_moved_once() -> None:
    preemption_policy = measured("auto", 1e-3, 1e-4)
    prompt = table(10, references=3, on_host=10)
    beams = [prompt + table(1) for _ in range(3)]
    assert preemption_policy.should_swap(beams, SIZE)
    assert not preemption_policy.should_swap(beams[:2], SIZE), (
        "another beam still uses the prompt's blocks"
    )


@pytest.mark.parametrize(("preemption", "swaps"), [("swap", True), ("recompute", False)])
def test_a_configured_preemption_is_kept(preemption: Preemption, swaps: bool) -> None:
    for token_s in (1e-5, 1.0):
        assert measured(preemption, 1e-3, token_s).should_swap([table(9)], SIZE) == swaps


def test_steps_that_mostly_decode_do_not_change_the_prompt_speed() -> None:
    preemption_policy = measured("auto", 1e-3, 1e-4)
    before = preemption_policy.token_s
    preemption_policy.observe(9.0, prefill_tokens=79, decode_tokens=21)
    preemption_policy.observe(9.0, prefill_tokens=0, decode_tokens=0)
    assert preemption_policy.token_s == before
