"""Random rows and beam searches for engines, and checks of their outputs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from batchinfer.engine.engine import Engine
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.stats import StepStats
from tests.engine.fake import EOS, NextToken, expected, hashed, make_request
from tests.engine.invariants import check_scheduler
from tests.engine.searches import assert_found, beams

PREFIXES = st.lists(st.lists(st.integers(1, 9), max_size=20), min_size=1, max_size=3)


def often_ends(context: bytes, stream: int, sample: int, position: int) -> int:
    """Return a token like ``hashed``, or an end-of-sequence token now and then."""
    token = hashed(context, stream, sample, position)
    return EOS if token % 7 == 0 else token


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    """Draw rows and searches that share prefixes; their hints about later rows may be wrong."""
    prefixes = draw(PREFIXES)
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from(prefixes),
                st.lists(st.integers(1, 3), min_size=1, max_size=12),
                st.sampled_from([1, 1, 3, 5]),
                st.booleans(),
                st.fixed_dictionaries(
                    {"max_tokens": st.integers(1, 20), "ignore_eos": st.booleans()}
                ),
                st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
                st.integers(0, 32),
                st.sampled_from([0, 0, 1, 2]),
                st.dictionaries(st.integers(1, 32), st.integers(0, 3), max_size=3),
            ),
            min_size=1,
            max_size=20,
        )
    )
    requests = []
    for row, (prefix, own, n, searches, params, penalty, later, adapter, points) in enumerate(rows):
        prompt = prefix + own
        if searches and n > 1:
            request = beams(row, prompt, n, length_penalty=penalty, **params)
        else:
            request = make_request(row, prompt, n=n, **params)
        requests.append(
            replace(
                request,
                reused_prefix_len=min(later, len(prompt)),
                adapter=adapter,
                branch_points=tuple(sorted(points.items())),
            )
        )
    return requests


def run_preempting(
    engine: Engine, requests: list[Request], every: int, most: int = 60
) -> tuple[dict[int, Completion], list[StepStats]]:
    """Run requests, preempting the newest sequence every ``every`` steps, up to ``most`` times."""
    for request in requests:
        engine.add_request(request)
    completions, steps, preempted = {}, [], 0
    while engine.num_unfinished:
        outcome = engine.step()
        check_scheduler(engine.scheduler)
        completions |= {done.request.row_id: done for done in outcome.completions}
        steps += [] if outcome.stats is None else [outcome.stats]
        running = list(engine.scheduler.table.running())
        if running and len(steps) % every == 0 and preempted < most:
            preempted += engine.scheduler.preempt(running[-1])
            check_scheduler(engine.scheduler)
    return completions, steps


def assert_expected(
    completion: Completion, next_token: NextToken = hashed, window: int = 0
) -> None:
    """Assert that a row or search has the same outputs as when it runs alone.

    Args:
        window: the number of tokens that a model sees if all its layers have windows; 0: all.
    """
    request = completion.request
    if request.params.beam_width:
        assert_found(completion, window=window)
        return
    assert completion.error_code is None
    assert [output.index for output in completion.outputs] == list(range(request.params.n))
    for output in completion.outputs:
        tokens = expected(request, output.index, next_token, window)
        assert output.token_ids.tolist() == tokens
        ended = tokens[-1] in request.stop_token_ids
        assert output.finish_reason == ("stop" if ended else "length")
