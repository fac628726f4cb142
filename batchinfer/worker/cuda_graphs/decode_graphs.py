"""Decode steps by CUDA graphs: one launch instead of hundreds.

A step in which every sequence computes one token always runs the same kernels; only what their
arrays hold changes. So it is captured once for each of a few batch sizes (and once more for steps
that share prefixes, which launch one kernel more a layer), over arrays that stay where they are,
and replayed. What Python passes to a kernel by value is frozen with it: it follows
from the batch size and the model alone. Lengths, tables and tokens are read on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np
import torch

from batchinfer.engine.step import Step
from batchinfer.worker.attention.attention import ForwardContext, forward_context
from batchinfer.worker.attention.triton import CudaAttention, shares_pieces
from batchinfer.worker.cuda_graphs.capture import CudaCapture, SyncWatch
from batchinfer.worker.cuda_graphs.inputs import DecodeInputs
from batchinfer.worker.kv_cache import KVCache

_LOG = logging.getLogger(__name__)

Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], Run]
"""From a computation to one that repeats it with what its inputs then hold."""

# Up to 64 a step is bound by reading weights, and rows that are padding cost nothing; beyond, they
# cost as much as others. (from which batch on, in steps of)
_STEPS = ((64, 32), (256, 64))


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The sizes that batches are padded to: powers of two to 64, then multiples of 32 and 64."""
    sizes = [1, 2, 4, 8, 16, 32, 64]
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + max(step for start, step in _STEPS if sizes[-1] >= start))
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """CUDA graphs of decode steps, by batch size.

    A model whose forward pass waits for the device (some mixtures of experts do) cannot be
    captured; that is noticed in its first step, and ``takes`` is false from then on.

    Args:
        model: called as in ``forward``.
        max_num_seqs: most sequences of a step.
        max_model_len: most tokens of a sequence.
        capture: CUDA's, by default.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        capture: Capture | None = None,
    ) -> None:
        self._model, self._cache = model, cache
        self._max_model_len = max_model_len
        self._sizes = batch_sizes(max_num_seqs)
        max_blocks = cache.layout.blocks_for(max_model_len)
        num_groups = len(cache.layout.windows)
        self._inputs = DecodeInputs(max_num_seqs, max_blocks, cache.pool.device, num_groups)
        self._capture = CudaCapture() if capture is None else capture
        self._replays: dict[tuple[int, bool], Run] = {}
        self._fits = True

    @property
    def num_captured(self) -> int:
        """Number of graphs captured so far."""
        return len(self._replays)

    def takes(self, step: Step) -> bool:
        """Whether ``logits`` can compute this step."""
        count = step.num_sequences
        return (
            self._fits
            and step.scored is None
            and step.adapters is None  # which rows an adapter takes differs from step to step
            and 0 < count == step.num_tokens <= self._sizes[-1]
            and step.block_tables.shape[1] <= self._inputs.max_blocks
            and bool((np.diff(step.query_starts) == 1).all())
        )

    @torch.inference_mode()
    def logits(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute a decode step by replay: write the KV of its tokens, attend.

        Args:
            step: one that ``takes`` is true of. Its block copies are made.
            tensors: its arrays on the device.

        Returns:
            Logits [R, vocabulary] of ``step.logits_indices``, in the model's dtype. The next call
            overwrites them.
        """
        count = step.num_sequences
        padded = next(size for size in self._sizes if size >= count)
        shares = shares_pieces(step)
        self._inputs.load(tensors, padded)
        replay = self._replays.get((padded, shares))
        logits = self._first(padded, shares) if replay is None else replay()
        if np.array_equal(step.logits_indices, np.arange(count)):
            return logits[:count]
        return logits.index_select(0, tensors["logits_indices"])

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture every batch size now, on sequences that compute nothing; the largest first.

        Those of steps that share prefixes are left to when they are met.
        """
        for padded in reversed(self._sizes):
            if self._fits and (padded, False) not in self._replays:
                self._inputs.load(self._nothing(), padded)
                self._first(padded, shares=False)

    def _first(self, padded: int, shares: bool) -> torch.Tensor:
        """Compute a batch size as it is, to see what it does and to compile it; then capture."""

        def run() -> torch.Tensor:
            return self._forward(padded, shares)

        syncs = SyncWatch()
        with syncs:
            logits = run()
        try:
            if syncs.seen:
                raise RuntimeError(f"it waits for the device ({', '.join(sorted(syncs.seen))})")
            self._replays[padded, shares] = self._capture(run)
        except RuntimeError as error:
            self._fits = False
            _LOG.warning("decode steps run without CUDA graphs: %s", error)
        return logits

    def _forward(self, padded: int, shares: bool) -> torch.Tensor:
        tensors = self._inputs.of(padded)
        backend = CudaAttention(self._cache)
        backend.begin_decode(tensors, self._max_model_len, shares=shares)
        with forward_context(ForwardContext(self._cache, backend, tensors)):
            output = self._model(
                input_ids=tensors["token_ids"][None],
                position_ids=tensors["positions"][None],
                use_cache=False,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _nothing(self) -> dict[str, torch.Tensor]:
        """Arrays of a step without sequences."""
        tensors = self._inputs.of(0)
        return tensors | {"query_starts": torch.zeros_like(self._inputs.of(0)["query_starts"])}
