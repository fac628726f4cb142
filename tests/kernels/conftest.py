"""Where the kernels' tests run: in Triton's interpreter, or on a GPU under the marker `gpu`.

Triton decides about the interpreter when it is imported, so the variable is set here, before any
test module of this folder is. A module elsewhere that imports Triton first has to be preceded by
the same two lines: `tests/conftest.py`.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def interpreter() -> str:
    """The device to make tensors on for a kernel that is interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU is here: run -m gpu, or set TRITON_INTERPRET=1 to interpret instead")
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(tl.max, InterpretedFunction):
        pytest.fail("triton was imported before TRITON_INTERPRET=1 was set; see tests/conftest.py")
    return "cpu"


@pytest.fixture
def gpu() -> str:
    """The device to make tensors on for a kernel that is compiled."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1 is set, which is silently wrong in bfloat16")
    return "cuda"


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """The device of a test that is `on_both`."""
    return str(request.getfixturevalue(request.param))
