"""The engine from Python: ``LLM(...).generate(...)``, with the names and meanings of vLLM's."""

from batchinfer.llm.llm import LLM
from batchinfer.llm.outputs import BeamSearchParams, CompletionOutput, Logprob, RequestOutput
from batchinfer.llm.prompts import Conversation, PromptLike

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Conversation",
    "Logprob",
    "PromptLike",
    "RequestOutput",
]
