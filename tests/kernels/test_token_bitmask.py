"""Token bitmasks: the kernel matches its reference and changes no other logits."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels import sampling_reference, token_bitmask
from tests.kernels.gpu_or_interpreter import on_both
from tests.kernels.sample_cases import Rows


@on_both()
@pytest.mark.parametrize(
    ("vocab", "words"), [(1, 1), (31, 1), (45, 2), (45, 1), (45, 4), (9001, 282), (9001, 0)]
)
def test_token_bitmask_equals_reference(
    vocab: int, words: int, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    masks = torch.randint(-(2**31), 2**31, (3, words), generator=generator).int().to(device)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    got, expected = (Rows(vocab, padding=3).logits(5, dtype, device) for _ in range(2))
    padding = got.as_strided((5, 3), got.stride(), vocab)
    assert padding.isnan().all()
    token_bitmask.apply_token_bitmask(got, rows, masks)
    sampling_reference.apply_token_bitmask(expected, rows, masks)
    assert torch.equal(got, expected)
    assert padding.isnan().all()


def test_token_bitmask_without_rows(interpreter: str) -> None:
    none = torch.empty(0, dtype=torch.int32)
    logits = Rows(45).logits(2, torch.float32, interpreter)
    token_bitmask.apply_token_bitmask(logits, none, none.view(0, 0))
    assert torch.equal(logits, Rows(45).logits(2, torch.float32))
