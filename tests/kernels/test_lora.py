"""LoRA kernels match their references, and a row's bits do not depend on other rows."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels import lora, reference
from tests.kernels.gpu_or_interpreter import on_both
from tests.kernels.lora_cases import LORA_CASES, LoraCase, build_lora

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@on_both()
@pytest.mark.parametrize("case", LORA_CASES, ids=str)
def test_lora_equals_reference(case: LoraCase, dtype: torch.dtype, device: str) -> None:
    scale = TOLERANCE[dtype]
    got, expected = (build_lora(case, device, dtype)[0] for _ in range(2))
    lora.lora_shrink(**got)
    reference.lora_shrink(**expected)
    used = sum(case.counts[: len(case.counts) - case.missing])
    torch.testing.assert_close(
        got["lowered"].sum(0)[:used],
        expected["lowered"].sum(0)[:used],
        rtol=scale,
        atol=scale * case.width**0.5,
    )
    assert got["lowered"][:, used:].isnan().all()
    got, expected = (build_lora(case, device, dtype)[1] for _ in range(2))
    untouched = got["out"].clone()
    lora.lora_expand(**got)
    reference.lora_expand(**expected)
    torch.testing.assert_close(
        got["out"], expected["out"], rtol=scale, atol=scale * case.ranks**0.5
    )
    unused = torch.ones(case.num_rows, dtype=torch.bool, device=device)
    unused[got["rows"][:used]] = False
    assert torch.equal(got["out"][unused], untouched[unused])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_lora_row_bits_do_not_depend_on_other_rows_on_gpu(dtype: torch.dtype, gpu: str) -> None:
    shrink, expand = build_lora(LORA_CASES[3], gpu, dtype)
    out = expand["out"].clone()
    lora.lora_shrink(**shrink)
    lora.lora_expand(**expand | {"lowered": shrink["lowered"]})
    place = 40  # a row of the third adapter
    row, lowered = shrink["rows"][place], torch.empty_like(shrink["lowered"][:, :1])
    starts = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32, device=gpu)
    alone = {"rows": row[None], "starts": starts}
    lora.lora_shrink(**shrink | alone | {"lowered": lowered})
    lora.lora_expand(**expand | alone | {"lowered": lowered, "out": out})
    assert torch.equal(out[row], expand["out"][row])
