"""Products of matrices in Triton's interpreter that sum every row alike, as a GPU's do.

The interpreter has NumPy multiply, whose BLAS sums the rows of one product in different orders,
each by where it lies. On a GPU each element of a product is summed by the same instructions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def sum_rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it so until the test ends."""
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)


def _dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    rows, columns = (x.data.astype(d.data.dtype) for x in (a, b))
    return TensorHandle(np.einsum("ik,kj->ij", rows, columns) + d.data, d.dtype.scalar)
