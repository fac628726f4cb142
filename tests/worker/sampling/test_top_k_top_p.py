"""Top-k and top-p keep the tokens that sorting whole rows would keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.worker.sampling import top_k_top_p
from batchinfer.worker.sampling.top_k_top_p import left_out, most_likely

# Few distinct values make ties common.
LOGITS = st.lists(st.integers(-12, 0), min_size=1, max_size=150)


@pytest.fixture(autouse=True, scope="module")
def _few_candidates() -> Iterator[None]:
    """Start with two candidates, so that small vocabularies reach the code for more candidates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_k_top_p, "_FIRST_CANDIDATES", 2)
        yield


def kept(
    weights: torch.Tensor, logits: torch.Tensor, top_k: list[int], top_p: list[float]
) -> list[set[int]]:
    """Return the ids that the filters keep in each row."""
    removed = left_out(weights, logits, np.array(top_k, np.int32), np.array(top_p, np.float32))
    return [set(np.flatnonzero(~row)) for row in removed.numpy()]


def in_order(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.lexsort((np.arange(len(logits)), -logits))


def reference_kept(
    weights: np.ndarray[Any, Any], logits: np.ndarray[Any, Any], top_k: int, top_p: float
) -> set[int]:
    """Return the ids that the filters keep in one row, decided token by token."""
    order = in_order(logits)
    order = order[:top_k] if top_k else order
    goal = np.float64(np.float32(top_p)) * sum(int(weights[i]) for i in order)
    ids, mass = set(), 0
    for token_id in order:
        if mass >= goal:
            break
        ids.add(int(token_id))
        mass += int(weights[token_id])
    return ids


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
    top_k, top_p = [k for k, _ in filters], [p / 64 for _, p in filters]
    got = kept(torch.from_numpy(weights), torch.from_numpy(rows), top_k, top_p)
    assert got == [reference_kept(*row) for row in zip(weights, rows, top_k, top_p, strict=True)]


def test_tokens_removed_earlier_do_not_count() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    weights = torch.tensor([[40, 30, 0, 0]])  # min-p removed the last two tokens
    assert kept(weights, logits, [4], [0.58]) == [{0, 1}]
    assert kept(weights, logits, [4], [0.57]) == [{0}]


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
