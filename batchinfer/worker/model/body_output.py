"""Hidden states that a model's body gives to its head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def body_of(model: torch.nn.Module) -> torch.nn.Module:
    """The part of one of transformers' causal language models that gives hidden states to its
    head."""
    named = getattr(model, str(model.base_model_prefix), None)  # Llama 4's is not there
    body: torch.nn.Module = model.model if named is None else named  # type: ignore[assignment]
    return body


def last_of_body(model: torch.nn.Module) -> torch.nn.Module:
    """The module that the model's own ``forward`` calls for hidden states: its body, or, of OPT and
    the like, the decoder in that."""
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
