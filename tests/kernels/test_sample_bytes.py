"""Bytes per logit that sampling loads and stores, counted in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from batchinfer.kernels import penalties, sample
from tests.kernels.sample_cases import Rows, build_edits, build_sample

VOCAB = 50_000
PEAKED, FLAT = Rows(VOCAB, 5.0, apart=VOCAB), Rows(VOCAB, 1.0, apart=VOCAB)


@dataclass
class Traffic:
    """Bytes loaded and stored; equal addresses of one instruction count once."""

    total: int = 0

    def add(self, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses = pointers.data[np.broadcast_to(mask, pointers.data.shape)]
        self.total += len(np.unique(addresses)) * size


@contextmanager
def counted_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """Count the traffic of the kernels that run inside the ``with`` block."""
    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        traffic.add(pointers, mask.data)
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.add(pointers, mask.data)
        return store(self, pointers, value, mask, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(InterpreterBuilder, "create_masked_load", counted_load)
        patched.setattr(InterpreterBuilder, "create_masked_store", counted_store)
        yield traffic


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
def test_sampling_reads_logits_at_most_twice(
    kind: dict[str, float],
    passes: int,
    dtype: torch.dtype,
    interpreter: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums of tiles and candidates take less than one byte per logit."""
    moved = bytes_per_logit(PEAKED, dtype, kind, monkeypatch)
    assert passes * dtype.itemsize <= moved <= passes * dtype.itemsize + 0.9


def test_flat_rows_take_at_most_two_more_passes(
    interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 6 <= bytes_per_logit(FLAT, torch.float16, {"top_p": 0.9}, monkeypatch) <= 8 + 1.8


def test_edited_rows_read_one_more_bit_per_logit(
    interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = PEAKED.logits(1, torch.float16)
    edits = build_edits(logits, [{"bias": {3: 1.0}, "output": [5, 9, 9], "presence": 1.0}])
    with counted_bytes(monkeypatch) as count:
        sample.sample(
            **build_sample(logits, [{"temperature": 1.0}]),
            edits=penalties.apply_penalties(**edits),
            filters=False,
        )
    assert 4 + 3 / 8 <= count.total / VOCAB <= 5
