"""Statistics of logits: the kernel equals its reference, and says where a row is not usable."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels import reference, row_stats
from tests.kernels.gpu_or_interpreter import on_both
from tests.kernels.row_cases import build_row_stats


@on_both()
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 45), (4, 9000), (0, 7)])
def test_equals_its_reference(num_rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    got, expected = (build_row_stats(num_rows, width, device, dtype) for _ in range(2))
    row_stats.row_stats(**got)
    reference.row_stats(**expected)
    for name in ("maximum", "max_logprob", "argmax"):
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 8999])
def test_a_row_without_a_finite_maximum_is_visible(bad: float, at: int, interpreter: str) -> None:
    arguments = build_row_stats(2, 9000, interpreter, torch.float32)
    arguments["logits"][1, slice(None) if bad == -torch.inf else at] = bad
    row_stats.row_stats(**arguments)
    assert arguments["maximum"].isfinite().tolist() == [True, False]
