"""Runs steps: one forward pass, then sampling."""

from __future__ import annotations

from collections.abc import Callable

import torch

from batchinfer.engine.step import SamplingBatch, Step
from batchinfer.worker.attention import make_backend
from batchinfer.worker.decode_graphs import DecodeGraphs
from batchinfer.worker.forward import forward
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear import PackedLinear
from batchinfer.worker.out_of_memory import telling
from batchinfer.worker.sampled import Sampled

Sample = Callable[[torch.Tensor, SamplingBatch], Sampled]
"""Draws the samples of a step from its logits [R, vocabulary]."""


class ModelRunner:
    """The data plane as the engine sees it: steps go in, what their samples came to comes out.

    On CUDA everything a step does is queued on the current stream, nothing waits for it, and the
    next step takes its tokens from the device; so steps run in order, as ``Runner`` asks. On the
    CPU a step is computed when it is submitted.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: KVCache,
        sample: Sample,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._sample = sample
        self._backend = make_backend(cache)
        self._previous = Sampled.nothing(cache.pool.device)
        self._graphs = graphs

    def submit(self, step: Step) -> Sampled:
        """Start one step. A step that samples nothing gives an empty result.

        Raises:
            OutOfMemory: there is none for it.
        """
        self._previous = telling(lambda: self._start(step))
        return self._previous

    def _start(self, step: Step) -> Sampled:
        sampled_before = self._previous.token_ids
        logits = forward(
            self._model, self._cache, self._backend, step, sampled_before, self._graphs
        )
        if step.num_samples == 0:
            return Sampled.nothing(logits.device)
        return self._sample(logits, step.sampling)

    def device_bytes(self) -> int:
        """Bytes in use: of a CUDA device as torch counts them, of a CPU weights and pool."""
        if self._cache.pool.is_cuda:
            return int(torch.cuda.memory_allocated(self._cache.pool.device))
        return model_bytes(self._model) + self._cache.nbytes


def model_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters, buffers and packed weights; tied ones count once."""
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    packed = (module.nbytes for module in model.modules() if isinstance(module, PackedLinear))
    return sum(tensors.values()) + sum(packed)
