"""Groups the tokens of a step by LoRA adapter."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

from batchinfer.engine.step import Int32, Int64, Step


class StepAdapters:
    """The tokens of a step that use an adapter, sorted by adapter.

    The token indices are copied to the device with the step's other arrays. The host also keeps
    where each adapter's tokens start and end, so ``each`` can slice the indices without waiting for
    the device.
    """

    def __init__(self, step: Step) -> None:
        assert step.adapters is not None
        by_token = np.repeat(step.adapters, np.diff(step.query_starts))
        order = np.argsort(by_token, kind="stable")
        self.tokens: Int64 = order[np.count_nonzero(by_token == 0) :].astype(np.int64)
        """[A] indices of tokens in the step."""
        numbers = np.arange(1, int(step.adapters.max(initial=0)) + 2)
        self.starts: Int32 = np.searchsorted(by_token[self.tokens], numbers).astype(np.int32)
        """[largest adapter number + 1] indices into ``tokens``: the starts of the tokens of
        adapters 1, 2, and so on, then the end of the last adapter's tokens."""
        spans = enumerate(pairwise(self.starts.tolist()), start=1)
        self._spans = [(adapter, span) for adapter, span in spans if span[0] < span[1]]

    def each(self, tokens: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each adapter's number and token indices. ``tokens`` is ``self.tokens`` on the
        device."""
        for adapter, (start, stop) in self._spans:
            yield adapter, tokens[start:stop]


def step_adapters(step: Step) -> StepAdapters | None:
    return None if step.adapters is None else StepAdapters(step)
