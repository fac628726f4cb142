"""Writing keys and values to the cache equals its reference."""

import pytest
import torch

from batchinfer.kernels import kv_write, reference
from tests.kernels.cases import WRITE_CASES, WriteCase, build_write
from tests.kernels.gpu_or_interpreter import on_both


@on_both()
@pytest.mark.parametrize("case", WRITE_CASES, ids=str)
def test_kv_write_equals_reference(case: WriteCase, dtype: torch.dtype, device: str) -> None:
    got, arguments = build_write(case, device, dtype)
    kv_write.kv_write(**arguments)
    expected, arguments = build_write(case, device, dtype)
    reference.kv_write(**arguments)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    written = int((arguments["slot_mapping"] >= 0).sum())
    assert int((~got.isnan()).sum()) == written * case.num_kv_heads * (
        case.key_width + case.value_width
    )
