"""Penalties, biases and allowed tokens match their reference bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchinfer.kernels import penalties, sampling_reference
from tests.kernels.gpu_or_interpreter import on_both
from tests.kernels.sample_cases import Rows, build_edits

LISTS: list[dict[str, Any]] = [
    {},
    {"bias": {3: 2.5, 40: -torch.inf, 7: -1.25}},
    {"allowed": [5, 5, 9, 44]},
    {"allowed": [5, 9], "bias": {9: -torch.inf, 11: 3.0}},
    {"prompt": [1, 2, 2, 30], "output": [2, 4, 4, 4], "repetition": 1.3},
    {"prompt": [1], "output": [4, 4, 7, 4], "presence": 0.7, "frequency": 0.3},
    {"output": [4] * 1500 + [5] * 700, "frequency": 0.01, "presence": -2.0, "repetition": 0.5},
    {"allowed": [4, 5], "output": [4, 6], "presence": 1.0, "bias": {4: 0.5}, "repetition": 1.1},
]


def check(logits: torch.Tensor, lists: list[dict[str, Any]], device: str) -> None:
    arguments = build_edits(logits, lists, device)
    got = penalties.apply_penalties(**arguments)
    expected = sampling_reference.apply_penalties(**arguments)
    assert got.present.tolist() == expected.present.tolist()
    assert (got.restricted != 0).tolist() == (expected.restricted != 0).tolist()
    for d, row in enumerate(arguments["rows"].tolist()):
        rows = (
            sampling_reference.edited_row(logits[row].float(), edits, d)
            for edits in (got, expected)
        )
        torch.testing.assert_close(*rows, rtol=0, atol=0, equal_nan=True)


@on_both()
@pytest.mark.parametrize("vocab", [45, 33_000])
def test_penalties_equal_reference(vocab: int, dtype: torch.dtype, device: str) -> None:
    check(Rows(vocab, padding=3).logits(3, dtype, device), LISTS, device)


def test_penalties_write_values_of_edited_tokens_only(
    interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = Rows(45).logits(2, torch.float32, interpreter)
    new_empty = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        tensor = new_empty(self, *size, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.fill_(-1)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    edited = penalties.apply_penalties(**build_edits(logits, LISTS, interpreter))
    written = [(~row.isnan()).nonzero()[:, 0].tolist() for row in edited.logits]
    assert written == [
        sorted({*edits.get("bias", ()), *edits.get("allowed", ()), *edits.get("prompt", ()),
                *edits.get("output", ())})
        for edits in LISTS
    ]  # fmt: skip
