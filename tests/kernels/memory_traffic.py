"""Counts what kernels load and store, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder


@dataclass
class Traffic:
    """Bytes of what was loaded and stored, and not masked out; once, what is so at once."""

    total: int = 0

    def add(self, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses = pointers.data[np.broadcast_to(mask, pointers.data.shape)]
        self.total += len(np.unique(addresses)) * size


@contextmanager
def counted_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """The traffic of the kernels that run inside."""
    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        traffic.add(pointers, mask.data)
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.add(pointers, mask.data)
        return store(self, pointers, value, mask, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(InterpreterBuilder, "create_masked_load", counted_load)
        patched.setattr(InterpreterBuilder, "create_masked_store", counted_store)
        yield traffic
