"""Records the work that a CUDA graph would freeze, to compare it with the work of later steps."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch

from tests.fake_cuda.launches import Launch


class FrozenError(Exception):
    """A graph would replay work with a value or an address of an earlier step."""


class Recording:
    """Work that is queued on the device: calls of operations and launches of kernels, in order.

    A tensor is recorded as its shape and place in memory. Memory that is allocated during the
    recording is numbered, because a graph has its own memory. Other memory has its address, which
    must be the same at each replay.
    """

    def __init__(self) -> None:
        self.work: list[tuple[Any, ...]] = []
        self._allocated: dict[int, int] = {}
        self._known: set[int] = set()
        self._kept: list[torch.Tensor] = []  # so that no address is used twice

    def call(self, name: str, args: Any, kwargs: Any, results: Iterable[torch.Tensor]) -> None:
        """Record a call of an operation; its results may be in new memory."""
        self.work.append((name, self._described(args), self._described(kwargs)))
        for result in results:
            address = _address(result)
            if address not in self._known:
                self._allocated[address] = len(self._allocated)
            self._keep(result, address)

    def launch(self, launch: Launch) -> None:
        """Record a launch of a kernel."""
        arguments = self._described(launch.arguments)
        self.work.append((launch.kernel, launch.grid, arguments, launch.signature))

    def check_equal(self, later: Recording) -> None:
        """Check that a graph of this work would do the work that a later step needs.

        Raises:
            FrozenError: names the first difference.
        """
        for captured, needed in zip_longest(self.work, later.work):
            if captured != needed:
                raise FrozenError(f"a graph has frozen {captured}, but a step needs {needed}")

    def _described(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            address = _address(value)
            self._keep(value, address)
            place = self._allocated.get(address, hex(address))
            layout = tuple(value.shape), value.stride(), value.storage_offset(), str(value.dtype)
            return (str(value.device), place, *layout)
        if isinstance(value, dict):
            return {name: self._described(each) for name, each in value.items()}
        if isinstance(value, tuple | list):
            return tuple(map(self._described, value))
        return str(value)

    def _keep(self, tensor: torch.Tensor, address: int) -> None:
        self._known.add(address)
        self._kept.append(tensor)


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
