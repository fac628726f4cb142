"""Runs a language model over a whole dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchinfer.config.call_params import (
        BeamSearchParams,
        GuidedDecodingParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from batchinfer.llm import (
        LLM,
        BeamSearchOutput,
        CompletionOutput,
        EmbedsPrompt,
        FlatLogprobs,
        Logprob,
        LoRARequest,
        PoolingParams,
        RequestOutput,
        TextPrompt,
        TokensPrompt,
    )

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbedsPrompt",
    "FlatLogprobs",
    "GuidedDecodingParams",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

_PARAMS = {
    "BeamSearchParams": "call_params",
    "GuidedDecodingParams": "structured_params",
    "RequestOutputKind": "call_params",
    "SamplingParams": "call_params",
    "StructuredOutputsParams": "structured_params",
}
"""Names that can be imported without torch, each with its module in ``batchinfer.config``."""


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that the command line handles signals before slow imports."""
    if name in _PARAMS:
        from importlib import import_module

        return getattr(import_module(f"batchinfer.config.{_PARAMS[name]}"), name)
    if name in __all__:
        from batchinfer.process.process import bound_spinning

        bound_spinning()  # must run before torch is imported
        from batchinfer import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
