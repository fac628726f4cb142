"""Reports how many images a step encoded, and how long that took on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from batchinfer.engine.runner import Pending
from batchinfer.engine.step import StepResult


class EncodeTimer:
    """Measures the time to encode images. On CUDA, the time is measured with events, so the host
    does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._times: list[Callable[[], float]] = []
        self._num_images = 0

    @contextmanager
    def images(self, count: int) -> Iterator[None]:
        """Measure the encoding of ``count`` images, which happens inside the ``with`` block."""
        if self._is_cuda:
            new_event: Any = torch.cuda.Event
            start, end = (new_event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._times.append(lambda: float(start.elapsed_time(end)))
        else:
            began = time.perf_counter()
            yield
            milliseconds = (time.perf_counter() - began) * 1e3
            self._times.append(lambda: milliseconds)
        self._num_images += count

    def handle(self, pending: Pending) -> Pending:
        """Return a handle of the same step, whose result includes all images measured since the
        last call of ``handle``."""
        if not self._num_images:
            return pending
        handle = EncodeHandle(pending, self._num_images, self._times)
        self._num_images, self._times = 0, []
        return handle


class EncodeHandle:
    """Handle of a step that encoded images.

    Args:
        times: functions that return times in milliseconds once the step is finished.
    """

    def __init__(self, pending: Pending, num_images: int, times: list[Callable[[], float]]) -> None:
        self._pending = pending
        self._num_images = num_images
        self._times = times

    def result(self) -> StepResult:
        """Return the step's result with ``images_encoded`` and ``encode_ms``.

        Raises:
            OutOfMemory: the device had too little memory for the step. On CUDA, this error appears
                only when the result is read.
        """
        result = self._pending.result()
        milliseconds = sum(each() for each in self._times)
        return replace(result, images_encoded=self._num_images, encode_ms=milliseconds)
