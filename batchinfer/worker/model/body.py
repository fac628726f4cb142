"""The body of a causal language model, and the hidden states it passes to its head."""

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
    """The part of a transformers causal language model below its head."""
    named = getattr(model, str(model.base_model_prefix), None)  # Llama 4's is not there
    body: torch.nn.Module = model.model if named is None else named  # type: ignore[assignment]
    return body


def last_of_body(model: torch.nn.Module) -> torch.nn.Module:
    """The module that the model's ``forward`` calls for hidden states: its body, or the decoder in
    it, as in OPT."""
    body = body_of(model)
    decoder = getattr(body, "decoder", None)
    return decoder if isinstance(decoder, torch.nn.Module) else body


@contextmanager
def recorded_output(model: torch.nn.Module, outputs: list[Any]) -> Iterator[None]:
    """Append the output of the model's body to ``outputs``, each time it is called inside."""
    hook = last_of_body(model).register_forward_hook(lambda *call: outputs.append(call[2]))
    try:
        yield
    finally:
        hook.remove()


class PooledHandle:
    """Handle of a step whose result includes hidden states.

    Args:
        pending: the rest of the step's result.
        output: of the model's body: its hidden states [1, T, H] after the final norm come first.
        tokens: [E] packed tokens whose hidden states are wanted.
    """

    def __init__(self, pending: Pending, output: Any, tokens: Int32) -> None:
        self._pending = pending
        hidden_states: torch.Tensor = output[0]
        on = to_device({"tokens": tokens.astype(np.int64)}, hidden_states.device)
        with torch.inference_mode():
            self._copy = HostCopy(hidden_states[0, on["tokens"]].float())

    def result(self) -> StepResult:
        """The step's result with hidden states, float32 [E, H].

        Raises:
            OutOfMemory: the device reports only now that it had no memory for the step.
        """
        hidden_states: Float32 = self._copy.wait().astype(np.float32, copy=False)
        return replace(self._pending.result(), hidden_states=hidden_states)
