"""Keeps a step's samples on the device for the next step, and copies them to the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.step import StepResult
from batchinfer.worker.oom import raise_out_of_memory
from batchinfer.worker.sampling.logprobs import Reported, RowStats
from batchinfer.worker.transfer import HostCopy

NONFINITE, NO_TOKEN_LEFT = 1, 2
"""Reasons why a sample has no token: its logits are NaN or infinite, or its bans and allowed ids
exclude all tokens."""


@dataclass(frozen=True, slots=True)
class Draws:
    """K samples that were drawn from R rows of logits, on the device that drew them."""

    token_ids: Tensor  # int64 [K]
    logprobs: Tensor  # float32 [K]
    failures: Tensor  # [K] 0, or why a sample has no token (its id and log-probability are 0)
    stats: RowStats


class SampleHandle:
    """Samples of a step. The constructor starts copying them to the host; ``result`` waits only for
    this copy.

    Args:
        token_ids: int64 [K], on any device.
        logprobs: float32 [K].
        failures: [K] 0, or why a sample has no token; True counts as ``NONFINITE``.
        reported: ranks, alternatives and named ids; None if no sample requested any. The first
            column of ``reported.values`` is not used.
    """

    def __init__(
        self,
        token_ids: Tensor,
        logprobs: Tensor,
        failures: Tensor,
        reported: Reported | None = None,
    ) -> None:
        self.token_ids = token_ids
        columns = [token_ids, logprobs, failures]
        self._num_top: int | None = None
        if reported is not None:
            self._num_top = reported.top_token_ids.shape[1]
            columns += [reported.ranks, reported.top_token_ids, reported.values[:, 1:]]
        # A single int32 matrix needs only one copy. float32 columns are reinterpreted as int32.
        self._packed = HostCopy(torch.cat([_as_int32(column) for column in columns], dim=1))

    @classmethod
    def nothing(cls, device: torch.device) -> SampleHandle:
        none = torch.zeros(0, device=device)
        return cls(none.long(), none, none)

    def result(self) -> StepResult:
        """Return the samples as arrays on the host.

        Raises:
            OutOfMemory: the device had too little memory for the step. On CUDA, this error appears
                only when the result is read.
        """
        with raise_out_of_memory():
            packed = self._packed.wait().view(np.int32)
        floats = packed.view(np.float32)
        ranks = top_token_ids = top_logprobs = named_logprobs = None
        if self._num_top is not None:
            ids_end, top_end = 4 + self._num_top, 4 + 2 * self._num_top
            ranks, top_token_ids = packed[:, 3], packed[:, 4:ids_end]
            top_logprobs = floats[:, ids_end:top_end]
            named_logprobs = floats[:, top_end:] if packed.shape[1] > top_end else None
        return StepResult(
            token_ids=packed[:, 0],
            logprobs=floats[:, 1],
            nonfinite=packed[:, 2].astype(np.bool_),
            no_token_left=packed[:, 2] == NO_TOKEN_LEFT,
            ranks=ranks,
            top_token_ids=top_token_ids,
            top_logprobs=top_logprobs,
            named_logprobs=named_logprobs,
        )


def _as_int32(column: Tensor) -> Tensor:
    matrix = column if column.ndim == 2 else column[:, None]
    return matrix.contiguous().view(torch.int32) if matrix.is_floating_point() else matrix.int()
