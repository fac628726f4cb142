"""The engine from Python: ``LLM(...).generate(...)``, with vLLM's names and meanings.

May import: config, errors, process, console, engine, text, pooling, requests, builders, report.
"""

from batchinfer.config.beam_params import BeamSearchParams
from batchinfer.config.call_params import (
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
from batchinfer.llm.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from batchinfer.llm.pooling.params import PoolingParams
from batchinfer.llm.prompts import Conversation, PromptLike, TextPrompt, TokensPrompt
from batchinfer.llm.vllm.request_metrics import RequestMetrics

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Conversation",
    "EmbeddingRequestOutput",
    "FlatLogprobs",
    "GuidedDecodingParams",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptLike",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]
