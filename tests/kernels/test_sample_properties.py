"""Sampling and penalties match their references for random rows, filters and edits.

These tests have their own file because the other tests must run without Hypothesis on GPU machines.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchinfer.kernels.top_k_top_p import goal_of_share
from tests.kernels import test_penalties, test_sample
from tests.kernels.sample_cases import Rows

IDS = st.lists(st.integers(0, 44), max_size=8)


@settings(max_examples=25)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "bias": st.dictionaries(
                    st.integers(0, 44), st.sampled_from([-torch.inf, -3.3, 100.0]), max_size=4
                ),
                "allowed": IDS,
                "prompt": IDS,
                "output": IDS,
                "presence": st.sampled_from([0.0, 0.5, -2.0]),
                "frequency": st.sampled_from([0.0, 0.3, -1.0]),
                "repetition": st.sampled_from([1.0, 1.3, 0.5]),
            }
        ),
        max_size=3,
    )
)
def test_penalties_equal_reference_for_random_edits(
    interpreter: str, lists: list[dict[str, Any]]
) -> None:
    test_penalties.check(Rows(45).logits(2, torch.float32, interpreter), lists, interpreter)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([3, 64, 300, 5000]),
    scale=st.sampled_from([0.0, 0.05, 1.0, 8.0]),
    rounded=st.booleans(),
    kind=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.05, 1.0, 3.0]),
            "min_p": st.sampled_from([0.0, 0.1]),
            "top_p": st.sampled_from([0.01, 0.5, 0.99, 1.0]),
            "top_k": st.sampled_from([0, 1, 2, 50, 400, 6000]),
        }
    ),
)
def test_sample_equals_reference_for_random_filters(
    seed: int, vocab: int, scale: float, rounded: bool, kind: dict[str, float], interpreter: str
) -> None:
    logits = scale * torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))
    test_sample.check(logits.round() if rounded else logits, [kind], interpreter)


@triton.jit
def _goal_kernel(share_ptr, mass_ptr, goal_ptr):
    at = tl.program_id(0)
    goal = goal_of_share(tl.load(share_ptr + at), tl.load(mass_ptr + at))
    tl.store(goal_ptr + at, goal)


@settings(max_examples=25)
@given(st.floats(0, 1, width=32), st.integers(1, 2**62))
@example(0.5, 10)
@example(1.0, 2**62 - 100)
def test_goal_of_share_is_the_smallest_mass_that_reaches_it_in_float64(
    interpreter: str, share: float, mass: int
) -> None:
    goal = torch.zeros(1, dtype=torch.int64)
    _goal_kernel[(1,)](torch.tensor([share]), torch.tensor([mass]), goal)
    target, least = share * float(mass), int(goal)
    assert float(least) >= target
    assert least == 1 or float(least - 1) < target
