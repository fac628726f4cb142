"""Where kernels can be launched."""

from __future__ import annotations

import pytest
import torch
import triton

from batchinfer.kernels import launch
from batchinfer.kernels.launch import can_interpret
from batchinfer.kernels.silu_mul import silu_mul


@pytest.mark.parametrize(
    ("triton_version", "numpy_version", "works"),
    [
        ("3.6.0", "2.4.0", False),
        ("3.6.0+git1234abcd", "2.10.1", False),
        ("3.6.0", "2.3.5", True),
        ("3.7.0", "2.4.6", True),
        ("3.10.0", "2.4.0rc1", True),
    ],
)
def test_an_interpreter_is_known_to_work_by_the_versions(
    triton_version: str, numpy_version: str, *, works: bool
) -> None:
    assert can_interpret(triton_version, numpy_version) == works


def test_an_interpreter_that_fails_beside_numpy_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(launch, "_numpy_version", lambda: "2.4.6")
    message = (
        "silu_mul: the interpreter of Triton 3.6.0 fails beside numpy 2.4.6; "
        "run pip install 'numpy<2.4', or install triton 3.7 or later"
    )
    with pytest.raises(RuntimeError) as raised:
        silu_mul(torch.ones(1, 4), out=torch.empty(1, 2))
    assert str(raised.value) == message
