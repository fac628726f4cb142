"""Runs steps: one forward pass, then sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from batchinfer.engine.runner import Pending
from batchinfer.engine.step import SamplingBatch, Step
from batchinfer.worker.attention.attention import make_backend
from batchinfer.worker.cuda_graphs.step_graphs import StepGraphs
from batchinfer.worker.forward import forward
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear_kernels import LinearKernel
from batchinfer.worker.memory import model_bytes
from batchinfer.worker.model.body import PooledHandle
from batchinfer.worker.oom import raise_out_of_memory
from batchinfer.worker.prompt_logprobs import PromptScorer, ScoredHandle
from batchinfer.worker.sampling.output import SampleHandle
from batchinfer.worker.vision.image_embeddings import ImageEmbeddings

Sample = Callable[[torch.Tensor, SamplingBatch], SampleHandle]
"""Draws a step's samples from logits [R, vocabulary]."""


class ModelRunner:
    """Runs steps on a model; implements the engine's ``Runner``.

    On CUDA, a step is queued on the current stream. The host does not wait for the step, because
    the next step reads the sampled token ids on the device. On the CPU, ``submit`` computes the
    step.

    Args:
        kernel: kernel of the model's linear layers; attention uses the same instructions.
        images: computes the embeddings of images; None if the model takes only text.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: KVCache,
        sample: Sample,
        graphs: StepGraphs | None = None,
        kernel: LinearKernel | None = None,
        images: ImageEmbeddings | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._sample = sample
        self._backend = make_backend(cache, kernel)
        self._previous = SampleHandle.nothing(cache.pool.device)
        self._graphs = graphs
        self._scorer = PromptScorer(model)
        self._images = images

    def recapture(self, capture: Callable[[], StepGraphs | None]) -> None:
        """Replace the graphs. The old graphs are freed before ``capture`` makes new graphs, because
        the memory plan reserves memory for only one set."""
        self._graphs = None
        self._graphs = capture()

    def submit(self, step: Step) -> Pending:
        """Start a step. The result of a step without samples is empty.

        Raises:
            OutOfMemory: the device has too little memory for the step.
        """
        pending: Pending
        with raise_out_of_memory():
            if step.scored is None and step.pooled is None:
                pending = self._previous = self._start(step)
            else:
                pending = self._start_with_body(step)
        return pending if self._images is None else self._images.timer.handle(pending)

    def _start(self, step: Step, body_outputs: list[Any] | None = None) -> SampleHandle:
        state = self._model, self._cache, self._backend
        previous = self._previous.token_ids
        logits = forward(*state, step, previous, self._graphs, body_outputs, self._images)
        if step.num_samples == 0:
            return SampleHandle.nothing(logits.device)
        return self._sample(logits, step.sampling)

    def _start_with_body(self, step: Step) -> Pending:
        """Sample first, then score, so that the samples' logits are freed before the logits of
        prompts are computed."""
        outputs: list[Any] = []
        pending: Pending = (sampled := self._start(step, outputs))
        self._previous = sampled
        (output,) = outputs
        if step.scored is not None:
            pending = ScoredHandle(sampled, self._scorer(output, step.scored))
        if step.pooled is not None:
            pending = PooledHandle(pending, output, step.pooled)
        return pending

    def device_bytes(self) -> int:
        """Return the number of bytes in use on the device: torch's count on CUDA; on a CPU, the
        size of the weights and the pool."""
        if self._cache.pool.is_cuda:
            return int(torch.cuda.memory_allocated(self._cache.pool.device))
        return model_bytes(self._model) + self._cache.nbytes
