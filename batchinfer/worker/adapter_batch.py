"""Adapters of a step: which rows run through which."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from batchinfer.engine.step import Int32, Int64, Step


class StepAdapters:
    """The tokens of a step that adapters change, those of one adapter side by side.

    The indices go to the device with the step's own arrays. Where an adapter's begin and end the
    host knows, so that nothing waits for the device; kernels there find it in ``starts``.
    """

    def __init__(self, step: Step) -> None:
        assert step.adapters is not None
        by_token = np.repeat(step.adapters, np.diff(step.query_starts))
        order = np.argsort(by_token, kind="stable")
        self.tokens: Int64 = order[np.count_nonzero(by_token == 0) :].astype(np.int64)
        """[A] indices of tokens."""
        used, starts, counts = np.unique(
            by_token[self.tokens], return_index=True, return_counts=True
        )
        stops = (starts + counts).tolist()
        numbers = np.arange(1, int(step.adapters.max(initial=0)) + 2)
        self.starts: Int32 = np.searchsorted(by_token[self.tokens], numbers).astype(np.int32)
        """[largest number + 1] where the tokens of adapters 1, 2, ... begin, and where the last
        ones end."""
        self._spans = list(zip(used.tolist(), starts.tolist(), stops, strict=True))

    def each(self, tokens: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Each adapter with the indices of its tokens.

        Args:
            tokens: ``self.tokens`` on the device.
        """
        for adapter, start, stop in self._spans:
            yield adapter, tokens[start:stop]


def step_adapters(step: Step) -> StepAdapters | None:
    """The adapters of a step; None where the base model runs alone."""
    return None if step.adapters is None else StepAdapters(step)
