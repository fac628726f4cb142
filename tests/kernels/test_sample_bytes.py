"""Bytes that sampling moves for each logit: every load and store of the kernels, counted."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels import penalties, sample
from tests.kernels.memory_traffic import counted_bytes
from tests.kernels.sample_cases import Rows, build_edits, build_sample

VOCAB = 50_000
PEAKED, FLAT = Rows(VOCAB, 5.0, apart=VOCAB), Rows(VOCAB, 1.0, apart=VOCAB)


def bytes_per_logit(
    rows: Rows, dtype: torch.dtype, kind: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> float:
    arguments = build_sample(rows.logits(1, dtype), [kind])
    draws = kind.get("temperature", 1.0) > 0
    with counted_bytes(monkeypatch) as count:
        sample.sample(**arguments, draws=draws, filters="top_k" in kind or "top_p" in kind)
    return count.total / VOCAB


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("kind", "passes"),
    [
        ({"temperature": 0.0}, 1),
        ({"temperature": 0.7}, 2),
        ({"top_k": 50}, 2),
        ({"top_p": 0.9}, 2),
        ({"top_k": 50, "top_p": 0.9, "min_p": 0.01}, 2),
    ],
    ids=str,
)
def test_two_passes_over_the_logits(
    kind: dict[str, float],
    passes: int,
    dtype: torch.dtype,
    interpreter: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And less than one for the sums of tiles and for the tokens found, some thousand at most."""
    moved = bytes_per_logit(PEAKED, dtype, kind, monkeypatch)
    assert passes * dtype.itemsize <= moved <= passes * dtype.itemsize + 0.9


def test_flat_rows_take_two_passes_more_at_most(
    interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample of the row says where the last token kept is, or another that goes on from it."""
    assert 6 <= bytes_per_logit(FLAT, torch.float16, {"top_p": 0.9}, monkeypatch) <= 8 + 1.8


def test_edits_cost_their_bits(interpreter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = PEAKED.logits(1, torch.float16)
    edits = build_edits(logits, [{"bias": {3: 1.0}, "output": [5, 9, 9], "presence": 1.0}])
    with counted_bytes(monkeypatch) as count:
        sample.sample(
            **build_sample(logits, [{"temperature": 1.0}]),
            edits=penalties.apply_penalties(**edits),
            filters=False,
        )
    assert 4 + 3 / 8 <= count.total / VOCAB <= 5
