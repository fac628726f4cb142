"""Fixtures of the kernel tests. They run in Triton's interpreter or, marked `gpu`, on a GPU.

Triton reads TRITON_INTERPRET when it is imported, so it is set here, before any test module of this
folder is imported. `tests/conftest.py` does the same for modules elsewhere.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def interpreter() -> str:
    """Return the device of tensors for interpreted kernels."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("this machine has a GPU: run -m gpu, or set TRITON_INTERPRET=1")
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(tl.max, InterpretedFunction):
        pytest.fail("triton was imported before TRITON_INTERPRET=1 was set; see tests/conftest.py")
    return "cpu"


@pytest.fixture
def gpu() -> str:
    """Return the device of tensors for compiled kernels."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1 is set, which computes bfloat16 wrongly")
    return "cuda"


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Return the device of a test decorated with `on_both` or `on_both_devices`."""
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut contexts into pieces of 64 tokens, so that short contexts have several."""
    from batchinfer.kernels import decode_plan

    monkeypatch.setattr(decode_plan, "DECODE_PIECE", 64)
