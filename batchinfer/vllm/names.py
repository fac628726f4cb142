"""Maps the names that programs import from vLLM to objects in batchinfer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

VERSION: Final = "0.32.0"
"""Version of vLLM whose API ``batchinfer.LLM`` follows."""

_PROMPTS = {
    "EmbedsPrompt": "batchinfer:EmbedsPrompt",
    "PromptType": "batchinfer.llm.prompts:PromptLike",
    "TextPrompt": "batchinfer:TextPrompt",
    "TokensPrompt": "batchinfer:TokensPrompt",
}
_OUTPUTS = {
    "CompletionOutput": "batchinfer:CompletionOutput",
    "RequestOutput": "batchinfer:RequestOutput",
    **{
        f"{kind}Output": f"batchinfer.llm.pooling.params:{kind}Output"
        for task in ("Classification", "Embedding", "Pooling", "Scoring")
        for kind in (task, f"{task}Request")
    },
}
_LOGPROBS = {
    "Logprob": "batchinfer:Logprob",
    "PromptLogprobs": "batchinfer.llm.logprobs:PromptLogprobs",
    "SampleLogprobs": "batchinfer.llm.logprobs:Logprobs",
}
_SAMPLING = {
    name: f"batchinfer:{name}"
    for name in (
        "BeamSearchParams",
        "GuidedDecodingParams",
        "RequestOutputKind",
        "SamplingParams",
        "StructuredOutputsParams",
    )
}
_FUNCTIONS = "batchinfer.vllm.functions"

MODULES: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "LLM": "batchinfer:LLM",
        "PoolingParams": "batchinfer:PoolingParams",
        "SamplingParams": "batchinfer:SamplingParams",
        "__version__": "batchinfer.vllm.names:VERSION",
        **_PROMPTS,
        **_OUTPUTS,
    },
    "vllm.distributed": {},
    "vllm.distributed.parallel_state": {
        "destroy_distributed_environment": f"{_FUNCTIONS}:destroy_distributed_environment",
        "destroy_model_parallel": f"{_FUNCTIONS}:destroy_model_parallel",
    },
    "vllm.entrypoints": {},
    "vllm.entrypoints.chat_utils": {
        "resolve_hf_chat_template": f"{_FUNCTIONS}:resolve_chat_template",
    },
    "vllm.entrypoints.llm": {"LLM": "batchinfer:LLM"},
    "vllm.inputs": _PROMPTS,
    "vllm.logprobs": {**_LOGPROBS, "FlatLogprobs": "batchinfer:FlatLogprobs"},
    "vllm.lora": {},
    "vllm.lora.request": {"LoRARequest": "batchinfer:LoRARequest"},
    "vllm.outputs": _OUTPUTS,
    "vllm.pooling_params": {"PoolingParams": "batchinfer:PoolingParams"},
    "vllm.renderers": {},
    "vllm.renderers.hf": {"resolve_chat_template": f"{_FUNCTIONS}:resolve_chat_template"},
    "vllm.sampling_params": _SAMPLING,
    "vllm.sequence": _LOGPROBS,
    "vllm.tokenizers": {"get_tokenizer": f"{_FUNCTIONS}:get_tokenizer"},
    "vllm.transformers_utils": {},
    "vllm.transformers_utils.tokenizer": {"get_tokenizer": f"{_FUNCTIONS}:get_tokenizer"},
}
"""Names in each module of vLLM, mapped to batchinfer's objects, as ``module:name``."""
