"""The engine from Python: ``LLM(...).generate(...)``, with vLLM's names and meanings.

May import: config, errors, process, console, engine, text, requests, resampling, build, report.
"""

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
