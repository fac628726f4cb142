"""Runs steps as CUDA graphs: one launch instead of hundreds.

Steps of one size run the same kernels; only the contents of their arrays differ. For each of a few
sizes, one step is captured, with arrays at fixed addresses, and replayed for every step that fits.
A graph freezes the values that Python passes to kernels, so these depend only on the size and the
model. Kernels read lengths, tables and tokens on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchinfer.engine.runner import OutOfMemory
from batchinfer.engine.step import SamplingBatch, Step
from batchinfer.worker.attention.attention import (
    ForwardContext,
    forward_context,
    make_cuda_backend,
)
from batchinfer.worker.attention.chunked import crosses_chunks
from batchinfer.worker.attention.cuda import shares_pieces
from batchinfer.worker.cuda_graphs.graph_sizes import GraphSize, GraphSizes, Kind, all_sizes
from batchinfer.worker.cuda_graphs.step_inputs import StepInputs
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear_kernels import LinearKernel
from batchinfer.worker.model.body import recorded_output
from batchinfer.worker.oom import raise_out_of_memory

_SECONDS_PER_LINE = 5.0

# Integer types, keyed by bytes per element. They replace bfloat16, which NumPy does not have.
_INTEGERS = {2: "<i2", 4: "<i4"}

# Operations that return a result on the host, or a result with a size that depends on device data.
_WAITS = frozenset(
    [
        *("_local_scalar_dense", "allclose", "equal", "is_nonzero", "item", "nonzero"),
        *("_unique2", "unique_consecutive", "unique_dim", "bincount", "masked_select", "one_hot"),
    ]
)


Run = Callable[[], tuple[torch.Tensor, ...]]
Capture = Callable[[Run], Run]
"""Captures a computation, and returns a function that repeats the computation with the current
contents of its inputs."""


class WaitsForDeviceError(Exception):
    """A forward pass makes the host wait for the device, so it cannot be captured."""


class StepGraphs:
    """CUDA graphs of a model's steps, one per size; none before ``capture_all``.

    If a model's forward pass waits for the device, as in some mixtures of experts, the model gets
    no graphs. Any other failure costs only the graph of one size. Steps of that size then use the
    next larger graph, or launch kernels one by one.

    Args:
        model: called as in ``forward``.
        max_num_seqs: largest number of sequences in a step.
        max_graph_tokens: largest number of tokens in a step with a graph.
        max_model_len: largest number of tokens in a sequence.
        num_adapters: number of the model's adapters.
        kernel: kernel of the model's linear layers, which determines the attention backend.
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
        self._max_model_len = max_model_len
        self.sizes = all_sizes(max_num_seqs, max_graph_tokens)
        """The sizes to capture, the largest first."""
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
        """Number of graphs."""
        return len(self._replays)

    def size_for(self, step: Step) -> GraphSize | None:
        """Return the size whose graph can compute a step; None if there is no such graph."""
        if step.num_sequences == 0 or step.images or not self._inputs.holds(step):
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
        """Compute a step by replaying a graph.

        Args:
            step: the step; its block copies must already be queued.
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
            log: receives a line every few seconds, and a line about each size that failed.
            captured: called after each size.
        """
        began = last_line = clock()
        lost: dict[str, list[GraphSize]] = {}
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
            captured()
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
            with SyncWatch() as syncs:
                run()
            if syncs.seen:
                seen = ", ".join(sorted(syncs.seen))
                raise WaitsForDeviceError(f"the model waits for the device ({seen})")
            self._replays[size] = self._capture(run)
        self._captured = GraphSizes(self._replays)

    def _forward(self, size: GraphSize) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the step that ``StepInputs`` holds. Return logits [S, vocabulary] and hidden
        states [1, T, hidden]."""
        tensors = self._inputs.of(size)
        backend = make_cuda_backend(self._cache, self._kernel)
        backend.begin_captured(
            tensors,
            self._max_model_len,
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
    """Return a step without sequences."""
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


class CudaCapture:
    """Captures computations on the current device, and returns functions that repeat them.

    All graphs use the same memory, one after the other: results are valid until the next replay.
    After a failure that CUDA itself reports, later graphs use new memory.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        # Graphs whose capture never ended are kept, because torch's allocator still calls them.
        self._never_ended: list[torch.cuda.CUDAGraph] = []

    def __call__(self, run: Run) -> Run:
        """Capture ``run``, which must have run once before.

        Raises:
            RuntimeError: ``run`` does something that cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        # Restores the current stream. If CUDA refuses to end a capture, torch leaves the capture's
        # stream as the current one.
        here = torch.cuda.stream(torch.cuda.current_stream())
        # Other threads may use CUDA during the capture, for example those that read files.
        capturing = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
        try:
            with here, capturing:
                results = [result.contiguous() for result in run()]
        except BaseException:
            if not _has_ended(graph):  # torch will regard the pool as in use forever
                self._pool = None
                self._never_ended.append(graph)
            raise
        self._pool = pool  # set only now, because torch forgets a pool without graphs
        aliases = tuple(map(_alias, results))

        def replay() -> tuple[torch.Tensor, ...]:
            graph.replay()
            return aliases

        return replay


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


class _Memory:
    """A view of a tensor's memory that does not own it (NumPy's CUDA array interface, version
    3)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": _INTEGERS[tensor.element_size()],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that does not own its memory, so that other graphs of the pool can use it."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)


class SyncWatch(TorchDispatchMode):
    """While active, records the names of torch operations that make the host wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        result = func(*args, **kwargs)
        if (
            name in _WAITS
            or (name == "where" and len(args) == 1)
            or (name == "repeat_interleave" and kwargs.get("output_size") is None)
            or (name.startswith("index") and _has_mask(args))
            or _comes_to_host(args, result)
            or _leaves_pageable_memory(name, args, result)
        ):
            self.seen.add(name)
        return result


def _has_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(at, torch.Tensor) and at.dtype is torch.bool for at in indices)


def _comes_to_host(args: Any, result: Any) -> bool:
    first = args[0] if args else None
    if not (isinstance(first, torch.Tensor) and isinstance(result, torch.Tensor)):
        return False
    return first.device.type != "cpu" and result.device.type == "cpu"


def _leaves_pageable_memory(name: str, args: Any, result: Any) -> bool:
    """Return true if the operation copies from pageable memory to the device, for which CUDA waits
    for the stream. Copies that ``torch.tensor`` makes are not detected."""
    if name not in ("copy_", "to", "_to_copy") or result.device.type == "cpu":
        return False
    source = args[1] if name == "copy_" else args[0]
    return source.device.type == "cpu" and not source.is_pinned()
