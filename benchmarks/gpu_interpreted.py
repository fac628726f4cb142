"""Runs the code for CUDA devices on a CPU: Triton's interpreter runs the kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for the module `tests`

_PIECE = 64
"""Tokens per piece of a context: few, so that short contexts have several pieces."""


@contextmanager
def interpreted() -> Iterator[None]:
    """Make CPU tensors report that they are on a CUDA device. Needs the environment variable
    TRITON_INTERPRET=1."""
    from batchinfer.kernels import decode_plan
    from batchinfer.worker.transfer import HostCopy
    from tests import interpreter

    def keep(self: HostCopy, tensor: torch.Tensor) -> None:
        self._event, self._host = None, tensor  # without a device there is no pinned memory

    interpreter.speed_up()
    with (
        patch.object(torch.Tensor, "is_cuda", True),
        patch.object(HostCopy, "__init__", keep),
        patch.object(decode_plan, "DECODE_PIECE", _PIECE),
    ):
        yield
