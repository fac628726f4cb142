"""Blocks that left a window serve others, and rows get what they get without windows."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.request import Request
from tests.engine.fake import (
    expected,
    make_engine,
    run_all,
)
from tests.engine.searches import assert_found
from tests.engine.test_swap import run_preempting, workloads

SIZE = 4


@settings(max_examples=50, deadline=None)
@given(
    requests=workloads(),
    block_size=st.sampled_from([1, 2, 4, 16]),
    pool_tokens=st.sampled_from([80, 128, 512]),
    max_tokens=st.sampled_from([5, 7, 64]),
    windows=st.sampled_from([(0, 3), (0, 0, 9), (0, 2, 9, 9), (9,), (2, 5)]),
    caching=st.booleans(),
    every=st.sampled_from([2, 5, 1000]),
    runs_ahead=st.booleans(),
)
def test_outputs_do_not_depend_on_what_left_a_window(
    requests: list[Request],
    block_size: int,
    pool_tokens: int,
    max_tokens: int,
    windows: tuple[int, ...],
    caching: bool,
    every: int,
    runs_ahead: bool,
) -> None:
    """The runner reads every position of every window, and checks that it is there."""
    engine, _ = make_engine(
        pool_tokens // block_size * len(windows),
        block_size,
        max_tokens=max_tokens,
        caching=caching,
        windows=windows,
        runs_ahead=runs_ahead,
    )
    if runs_ahead:
        completions, _ = run_all(engine, requests)
    else:
        completions, _ = run_preempting(engine, requests, every)
    sees = 0 if 0 in windows else max(windows)
    for completion in completions.values():
        if completion.error_code == "does_not_fit":
            continue
        if completion.request.params.beam_width:
            assert_found(completion, window=sees)
            continue
        for output in completion.outputs:
            tokens = expected(completion.request, output.index, window=sees)
            assert output.token_ids.tolist() == tokens
    assert len(completions) == len(requests)
    assert engine.scheduler.pool.num_used == 0
