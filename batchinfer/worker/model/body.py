"""Finds the body of a causal language model, and records the hidden states that it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from batchinfer.engine.runner import Pending
from batchinfer.engine.step import Float32, Int32, StepResult
from batchinfer.worker.transfer import HostCopy, to_device


def body_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return the part of transformers' causal language model below its head."""
    named = getattr(model, str(model.base_model_prefix), None)  # Llama 4 has no such attribute
    body: torch.nn.Module = model.model if named is None else named  # type: ignore[assignment]
    return body


def embedding_size(model: torch.nn.Module) -> int:
    """Return the size H of the model's input embeddings; 0 if it cannot run on embeddings alone,
    because its layers look up further embeddings of token ids (Gemma 3n, Gemma 4)."""
    if getattr(body_of(model), "hidden_size_per_layer_input", None):
        return 0
    size: int = model.get_input_embeddings().embedding_dim  # type: ignore[operator]
    return size


def last_of_body(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that the model's ``forward`` calls for hidden states: the body, or the
    body's decoder (OPT)."""
    body = body_of(model)
    decoder = getattr(body, "decoder", None)
    return decoder if isinstance(decoder, torch.nn.Module) else body


@contextmanager
def recorded_output(model: torch.nn.Module, outputs: list[Any]) -> Iterator[None]:
    """Append the output of the model's body to ``outputs`` for each call inside the ``with``
    block."""
    hook = last_of_body(model).register_forward_hook(lambda *call: outputs.append(call[2]))
    try:
        yield
    finally:
        hook.remove()


class PooledHandle:
    """Handle of a step whose result includes hidden states.

    Args:
        output: output of the model's body, which begins with its hidden states [1, T, H] after the
            final norm.
        tokens: [E] indices of the tokens whose hidden states are returned.
    """

    def __init__(self, pending: Pending, output: Any, tokens: Int32) -> None:
        self._pending = pending
        hidden_states: torch.Tensor = output[0]
        on = to_device({"tokens": tokens.astype(np.int64)}, hidden_states.device)
        with torch.inference_mode():
            self._copy = HostCopy(hidden_states[0, on["tokens"]].float())

    def result(self) -> StepResult:
        """Return the step's result with hidden states, float32 [E, H].

        Raises:
            OutOfMemory: the device had too little memory for the step. On CUDA, this error appears
                only when the result is read.
        """
        hidden_states: Float32 = self._copy.wait().astype(np.float32, copy=False)
        return replace(self._pending.result(), hidden_states=hidden_states)
