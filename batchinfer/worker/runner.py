"""Runs steps: one forward pass, then sampling."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from batchinfer.engine.step import SamplingBatch, Step, StepResult
from batchinfer.worker.attention import make_backend
from batchinfer.worker.forward import forward
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear import PackedLinear

Sample = Callable[[torch.Tensor, SamplingBatch], StepResult]
"""Draws the samples of a step from its logits [R, vocabulary]."""


class ModelRunner:
    """The data plane as the engine sees it: a step goes in, what its samples came to comes out."""

    def __init__(self, model: torch.nn.Module, cache: KVCache, sample: Sample) -> None:
        self._model = model
        self._cache = cache
        self._sample = sample
        self._backend = make_backend(cache)

    def run(self, step: Step) -> StepResult:
        """Compute one step. A step that samples nothing gives an empty result."""
        logits = forward(self._model, self._cache, self._backend, step)
        if step.num_samples == 0:
            return _empty_result()
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


def _empty_result() -> StepResult:
    return StepResult(
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        nonfinite=np.empty(0, np.bool_),
        ranks=None,
        top_token_ids=None,
        top_logprobs=None,
    )
