"""Top-k and top-p against sorting whole rows, on integers where there is no rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.worker.sampling import top_k_top_p
from batchinfer.worker.sampling.top_k_top_p import keep_most_likely, most_likely

# Few distinct values, so that ties are common.
LOGITS = st.lists(st.integers(-12, 0), min_size=1, max_size=150)


@pytest.fixture(autouse=True, scope="module")
def _few_candidates() -> Iterator[None]:
    """Makes tests of small vocabularies go through blocks and beyond the first candidates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_k_top_p, "_FIRST_CANDIDATES", 2)
        yield


def in_order(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.lexsort((np.arange(len(logits)), -logits))


def reference_kept(
    weights: np.ndarray[Any, Any], logits: np.ndarray[Any, Any], top_k: int, top_p: float
) -> set[int]:
    """One row, token by token."""
    order = in_order(logits)
    order = order[:top_k] if top_k else order
    goal = top_p * sum(int(weights[i]) for i in order)
    kept, mass = set(), 0
    for token_id in order:
        if mass >= goal:
            break
        kept.add(int(token_id))
        mass += int(weights[token_id])
    return kept


@given(
    st.data(),
    LOGITS,
    st.lists(st.tuples(st.integers(0, 160), st.integers(1, 64)), min_size=1, max_size=5),
)
def test_keeps_what_sorting_keeps(
    data: st.DataObject, logits: list[int], filters: list[tuple[int, int]]
) -> None:
    rows = np.array([data.draw(st.permutations(logits)) for _ in filters], np.float32)
    weights = np.exp2(rows + 12).astype(np.int64)
    top_k = np.array([k for k, _ in filters], np.int32)
    top_p = np.array([p / 64 for _, p in filters], np.float32)
    result = torch.from_numpy(weights.copy())
    keep_most_likely(result, torch.from_numpy(rows), top_k, top_p)
    for row, (left, before) in enumerate(zip(result.numpy(), weights, strict=True)):
        kept = reference_kept(before, rows[row], int(top_k[row]), float(top_p[row]))
        assert set(np.flatnonzero(left)) == kept
        assert (left[list(kept)] == before[list(kept)]).all()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 30.0])
@pytest.mark.parametrize("centre", [-1.0, 0.0, 1.0])
def test_logits_that_differ_in_any_bit_are_told_apart(scale: float, centre: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = centre + scale * torch.randn(4, 2000, generator=generator)
    weights = ((logits - logits.amax(1, keepdim=True)).exp() * 2.0**40).long()
    left = weights.clone()
    top_p = np.array([0.05, 0.5, 0.9, 0.999], np.float32)
    keep_most_likely(left, logits, np.zeros(4, np.int32), top_p)
    for row in range(4):
        kept = reference_kept(weights[row].numpy(), logits[row].numpy(), 0, float(top_p[row]))
        assert set(np.flatnonzero(left[row].numpy())) == {i for i in kept if weights[row, i] > 0}


def test_tokens_removed_before_count_for_nothing() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    weights = torch.tensor([[40, 30, 0, 0]])  # min-p took the last two
    keep_most_likely(weights, logits, np.array([4], np.int32), np.array([0.58], np.float32))
    assert weights.tolist() == [[40, 30, 0, 0]]
    keep_most_likely(weights, logits, np.array([4], np.int32), np.array([0.57], np.float32))
    assert weights.tolist() == [[40, 0, 0, 0]]


def test_top_p_of_a_flat_row_goes_through_the_whole_vocabulary() -> None:
    weights = torch.ones(2, 100, dtype=torch.int64)
    keep_most_likely(
        weights, torch.zeros(2, 100), np.zeros(2, np.int32), np.array([0.75, 0.5], np.float32)
    )
    assert weights.sum(1).tolist() == [75, 50]
    assert weights[0, :75].all()


@given(
    st.lists(
        st.sampled_from([0.0, -0.0, 1.5, -1.5, 3e38, -3e38, 1e-45, -1e-45, -np.inf]),
        min_size=1,
        max_size=200,
    ),
    st.data(),
)
def test_most_likely_is_by_logit_then_id(logits: list[float], data: st.DataObject) -> None:
    row = np.array(logits, np.float32)
    size = data.draw(st.integers(0, len(row)))
    ids = most_likely(torch.from_numpy(row)[None], size)
    assert ids.tolist() == [in_order(row)[:size].tolist()]


def test_most_likely_looks_at_every_block_of_a_long_row() -> None:
    logits = torch.randn(3, 20011, generator=torch.Generator().manual_seed(0))
    for size in (1, 7, 300):
        assert most_likely(logits, size).equal(logits.topk(size, dim=1).indices)
