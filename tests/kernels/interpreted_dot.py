"""Makes `tl.dot` in Triton's interpreter sum all rows in the same order, as on a GPU.

The interpreter uses NumPy, whose BLAS sums a row in an order that depends on its position.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def sum_rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the interpreter's `tl.dot` until the test ends."""
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)


def _dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    rows, columns = (x.data.astype(d.data.dtype) for x in (a, b))
    return TensorHandle(np.einsum("ik,kj->ij", rows, columns) + d.data, d.dtype.scalar)
