"""The engine from Python: ``LLM(...).generate(...)``, with vLLM's names and meanings.

May import: config, errors, process, console, engine, text, requests, resampling, build, report.
"""

from batchinfer.config.call_params import (
    BeamSearchParams,
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from batchinfer.llm.beam_outputs import BeamSearchOutput, BeamSearchSequence
from batchinfer.llm.llm import LLM
from batchinfer.llm.logprobs import FlatLogprobs, Logprob
from batchinfer.llm.lora import LoRARequest
from batchinfer.llm.outputs import CompletionOutput, RequestOutput
from batchinfer.llm.prompts import Conversation, PromptLike, TextPrompt, TokensPrompt
from batchinfer.llm.request_metrics import RequestMetrics

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Conversation",
    "FlatLogprobs",
    "GuidedDecodingParams",
    "LoRARequest",
    "Logprob",
    "PromptLike",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]
