"""The Python API: ``LLM(...).generate(...)`` and its classes, named and used as in vLLM."""

from batchinfer.llm.llm import LLM
from batchinfer.llm.logprobs import FlatLogprobs, Logprob
from batchinfer.llm.lora import LoRARequest
from batchinfer.llm.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
)
from batchinfer.llm.pooling.params import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from batchinfer.llm.prompts import EmbedsPrompt, TextPrompt, TokensPrompt

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "FlatLogprobs",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "ScoringRequestOutput",
    "TextPrompt",
    "TokensPrompt",
]
