"""Run a language model over a whole dataset, as many sequences at a time as memory allows."""

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
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
}
"""What needs no torch."""


def __getattr__(name: str) -> Any:
    """Import what is first asked for: the command line starts without, and heeds signals sooner."""
    if name in _PARAMS:
        from batchinfer.config import call_params

        return getattr(call_params, name)
    if name in __all__:
        from batchinfer.process import bound_spinning

        bound_spinning()  # before torch is imported
        from batchinfer import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
