"""Runs steps as CUDA graphs, each with one launch instead of hundreds.

Steps of one size run the same kernels; only the contents of their arrays differ. For each of a few
sizes, one step is captured, with arrays at fixed addresses, and replayed for every step that fits.
A graph freezes the values that Python passes to kernels, so these values may depend only on the
size and the model. Kernels read lengths, block tables and tokens from device memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch

from batchinfer.engine.runner import OutOfMemory
from batchinfer.engine.step import SamplingBatch, Step
from batchinfer.worker.attention.attention import (
    ForwardContext,
    forward_context,
    make_cuda_backend,
)
from batchinfer.worker.attention.chunked import crosses_chunks
from batchinfer.worker.attention.cuda import shares_pieces
from batchinfer.worker.cuda_graphs.capture import Capture, CaptureRefusedError, CudaCapture, Run
from batchinfer.worker.cuda_graphs.graph_sizes import GraphSize, GraphSizes, Kind, all_sizes
from batchinfer.worker.cuda_graphs.step_inputs import StepInputs
from batchinfer.worker.cuda_graphs.sync_watch import WaitsForDeviceError, run_without_waits
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear_kernels import LinearKernel
from batchinfer.worker.model.body import recorded_output
from batchinfer.worker.oom import raise_out_of_memory

_SECONDS_PER_LINE = 5.0
_MOST_REFUSED = 2
"""Number of refused captures after which capturing stops. All sizes run the same operations, so
CUDA would probably refuse the remaining sizes too, and each refused capture leaks memory."""


class StepGraphs:
    """CUDA graphs of a model's steps, one per size. ``capture_all`` makes the graphs.

    If a model's forward pass waits for the device, as in some mixture-of-experts models, the model
    gets no graphs. After two refused captures, capturing stops. After any other failed capture,
    only the graph of that size is missing. A step whose size has no graph uses the next larger
    graph, or launches its kernels one by one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_graph_tokens: int,
        max_model_len: int,
        num_adapters: int = 0,
        kernel: LinearKernel | None = None,
        capture: Capture | None = None,
    ) -> None:
        self._model, self._cache, self._kernel = model, cache, kernel
        self.max_model_len = max_model_len
        self.sizes = all_sizes(max_num_seqs, max_graph_tokens)
        layout = cache.layout
        largest = GraphSize("mixed", self.sizes[0].tokens, max_num_seqs)
        self._inputs = StepInputs(
            largest,
            layout.blocks_for(max_model_len),
            cache.pool.device,
            max(len(layout.windows), 1),
            num_adapters,
            layout.slots_per_state,
        )
        self._capture = CudaCapture() if capture is None else capture
        self._replays: dict[GraphSize, Run] = {}
        self._captured = GraphSizes([])
        self._body_output_type: Any = None

    @property
    def num_captured(self) -> int:
        return len(self._replays)

    def size_for(self, step: Step) -> GraphSize | None:
        """Return the size whose graph can compute a step, or None."""
        has_embeddings = step.images or step.prompt_embeds
        if step.num_sequences == 0 or has_embeddings or not self._inputs.holds(step):
            return None
        chunks = self._cache.layout.chunks
        if chunks and crosses_chunks(step, max(chunks)):
            return None
        num_rows = max(step.num_sequences, len(step.logits_indices))
        size = self._captured.least(kind_of(step), step.num_tokens, num_rows)
        num_chunks = np.count_nonzero(np.diff(step.query_starts) > 1)
        return None if size is None or num_chunks > size.max_chunks else size

    @torch.inference_mode()
    def logits(
        self,
        step: Step,
        size: GraphSize,
        prev_token_ids: torch.Tensor | None = None,
        body_outputs: list[Any] | None = None,
    ) -> torch.Tensor:
        """Compute a step by replaying the graph of ``size``.

        Args:
            step: the step, whose block copies must already be queued.
            size: the size that ``size_for`` returned for the step.
            prev_token_ids: int64 token ids that the previous step sampled;
                ``step.previous_sample`` indexes them.
            body_outputs: receives the output of the model's body.

        Returns:
            Logits [R, vocabulary] of ``step.logits_indices``, in the model's dtype. The next call
            overwrites the logits and the body's output.
        """
        self._inputs.load(step, size, prev_token_ids)
        logits, hidden = self._replays[size]()
        if body_outputs is not None:
            body_outputs.append(self._body_output_type(last_hidden_state=hidden))
        return logits[: len(step.logits_indices)]

    def capture_all(
        self,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        captured: Callable[[], None] = lambda: None,
    ) -> None:
        """Capture a graph for every size, with empty steps.

        Args:
            log: receives progress every few seconds, each reason why captures failed, and a
                summary.
            captured: called after each size.
        """
        began = last_line = clock()
        lost: dict[str, list[GraphSize]] = {}
        num_refused = 0
        for done, size in enumerate(self.sizes):
            if clock() - last_line >= _SECONDS_PER_LINE:
                last_line = clock()
                log(f"CUDA graphs: {done} of {len(self.sizes)} sizes captured")
            try:
                self.capture(size)
            except WaitsForDeviceError as error:
                log(f"steps run without CUDA graphs, because {error}")
                return
            except (RuntimeError, OutOfMemory) as error:
                lost.setdefault(str(error), []).append(size)
                num_refused += isinstance(error, CaptureRefusedError)
            captured()
            if num_refused == _MOST_REFUSED:
                log(f"CUDA graphs: only {done + 1} of {len(self.sizes)} sizes were tried")
                break
        for reason, sizes in lost.items():
            log(f"CUDA graphs could not be captured for steps of {_listed(sizes)}: {reason}")
        log(f"CUDA graphs: {self.num_captured} sizes captured in {clock() - began:.0f} s")

    @torch.inference_mode()
    def capture(self, size: GraphSize) -> None:
        """Run an empty step of a size to compile its kernels, then capture it.

        Raises:
            WaitsForDeviceError: the forward pass waits for the device.
            OutOfMemory: the device has too little memory. All memory of the attempt is freed.
            RuntimeError: the step cannot be captured.
        """
        run = partial(self._forward, size)
        self._inputs.load(_nothing(), size, None)
        with raise_out_of_memory():
            run_without_waits(run)
            self._replays[size] = self._capture(run)
        self._captured = GraphSizes(self._replays)

    def _forward(self, size: GraphSize) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the step that ``StepInputs`` holds. Return logits [S, vocabulary] and hidden
        states [1, T, hidden]."""
        tensors = self._inputs.of(size)
        backend = make_cuda_backend(self._cache, self._kernel)
        backend.begin_captured(
            tensors,
            self.max_model_len,
            shares=size.kind != "decode",
            max_chunks=size.max_chunks,
        )
        outputs: list[Any] = []
        with (
            forward_context(ForwardContext(self._cache, backend, tensors)),
            recorded_output(self._model, outputs),
        ):
            output = self._model(
                input_ids=tensors["token_ids"][None],
                position_ids=tensors["positions"][None],
                use_cache=False,
                logits_to_keep=tensors["logits_indices"],
            )
        self._body_output_type = type(outputs[0])
        return output.logits[0], outputs[0].last_hidden_state


def kind_of(step: Step) -> Kind:
    """Return the kind of graph that a step needs."""
    if not (np.diff(step.query_starts) == 1).all():
        return "mixed"
    return "shared decode" if shares_pieces(step) else "decode"


def _listed(sizes: list[GraphSize]) -> str:
    return ", ".join(f"{size.tokens} tokens in {size.sequences} sequences" for size in sizes)


def _nothing() -> Step:
    none, empty = np.empty(0, dtype=np.int32), np.empty(0)
    sampling: dict[str, Any] = {entry.name: empty for entry in fields(SamplingBatch)}
    return Step(
        token_ids=none,
        previous_sample=none,
        positions=none,
        query_starts=np.zeros(1, dtype=np.int32),
        context_lens=none,
        block_tables=np.empty((0, 0), dtype=np.int32),
        slot_mapping=np.empty(0, dtype=np.int64),
        block_copies=np.empty((0, 2), dtype=np.int32),
        logits_indices=none,
        sampling=SamplingBatch(**(sampling | {"penalties": None})),
    )
