import pytest
import torch

from batchinfer.kernels import kv_write, launch, reference
from tests.kernels.cases import WRITE_CASES, WriteCase, build_write


def check(case: WriteCase, device: str, dtype: torch.dtype) -> None:
    """The kernel leaves the whole pool as its twin does, bit for bit."""
    got, arguments = build_write(case, device, dtype)
    kv_write.kv_write(**arguments)
    expected, arguments = build_write(case, device, dtype)
    reference.kv_write(**arguments)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    written = int((arguments["slot_mapping"] >= 0).sum())
    assert int((~got.isnan()).sum()) == written * case.num_kv_heads * (
        case.key_width + case.value_width
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", WRITE_CASES, ids=str)
def test_equals_its_twin(case: WriteCase, dtype: torch.dtype, interpreter: str) -> None:
    check(case, interpreter, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", WRITE_CASES, ids=str)
def test_equals_its_twin_on_a_gpu(case: WriteCase, dtype: torch.dtype, gpu: str) -> None:
    check(case, gpu, dtype)


def test_refuses_the_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    _, arguments = build_write(WRITE_CASES[0], "cpu", torch.float32)
    with pytest.raises(RuntimeError, match="kv_write: tensors are on 'cpu'"):
        kv_write.kv_write(**arguments)
