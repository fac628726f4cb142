"""Checks the arguments of an ``LLM``: those it is made from, and those of other tools' calls."""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from batchinfer.config import QUANTIZATIONS, EngineConfig, ModelConfig, field_names
from batchinfer.errors import NotYetError

_NOT_YET: Mapping[str, object] = {
    "trust_remote_code": False,
    "preset": None,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "speculative_config": None,
    "cpu_offload_gb": 0,
    "tools": None,
    "chat_template": None,
}
"""Arguments of job files and of vLLM that are not built, with their defaults."""

_NO_EFFECT = frozenset(
    {
        "enforce_eager",
        "enable_chunked_prefill",
        "disable_log_stats",
        "disable_custom_all_reduce",
        "max_seq_len_to_capture",
        "tokenizer_mode",
        "load_format",
        "task",
        "runner",
        "async_scheduling",
        "distributed_executor_backend",
        "compilation_config",
        "chat_template_content_format",
        "priority",
    }
)
"""Arguments of vLLM for what is done here in one way, or not at all."""

_ELSEWHERE: Mapping[str, str] = {
    "seed": "give SamplingParams(seed=...)",
    "enable_lora": "give adapters={name: folder}",
    "lora_request": "give adapters={name: folder} to LLM, and adapter=name here",
    "download_dir": "set the environment variable HF_HOME",
    "hf_token": "set the environment variable HF_TOKEN",
    "tokenizer_revision": "give the tokenizer's folder as tokenizer",
    "max_logprobs": "20 can be had at most, with SamplingParams(logprobs=...)",
    "messages": "give the conversations as the first argument",
    "prompt_token_ids": "give the token ids as prompts",
    "add_generation_prompt": "a conversation that ends with the user's words is answered",
    "continue_final_message": "a conversation that ends with the assistant's words is continued",
}
"""Arguments of vLLM for what is had in another way."""


def model_config(
    model: Any,
    *,
    tokenizer: Any,
    revision: Any,
    dtype: Any,
    max_model_len: Any,
    quantization: Any,
    adapters: Any,
) -> ModelConfig:
    """The model's configuration, from arguments that may be paths.

    Raises:
        NotYetError: there is no such quantization.
        TypeError: naming the argument, when it is of another type.
        ValueError: ``max_model_len`` is not positive.
    """
    name = _as_text(model)
    if not isinstance(name, str):
        raise TypeError(f"model is {reprlib.repr(name)}; it must be a text")
    if isinstance(adapters, Mapping):
        adapters = {adapter: _as_text(path) for adapter, path in adapters.items()}
    config = ModelConfig(
        name, revision, _as_text(tokenizer), dtype, max_model_len, quantization, adapters
    )
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise NotYetError(f"LLM(quantization={quantization!r})")
    return config


def _as_text(path: Any) -> Any:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def engine_config(keys: Mapping[str, Any]) -> EngineConfig:
    """The engine's configuration, from arguments that may be unknown or not built yet.

    Raises:
        NotYetError: job files know the argument, ``LLM`` does not build it.
        TypeError, ValueError: it is unknown, of another type or out of range.
    """
    known = field_names(EngineConfig)
    others = {name: value for name, value in keys.items() if name not in known}
    refuse_others("LLM", others, known)
    return EngineConfig(**{name: value for name, value in keys.items() if name in known})


def refuse_others(call: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuse arguments that ``call`` does not have; those of vLLM with what is the case.

    Args:
        given: by name. One that is not built may be given with its default.
        known: names that may have been meant.

    Raises:
        NotYetError: it is not built.
        TypeError: it has no effect, is had in another way, or is unknown.
    """
    for name, value in given.items():
        if name in _NOT_YET:
            if value != _NOT_YET[name]:
                raise NotYetError(f"{call}({name}=...)")
        elif name in _NO_EFFECT:
            raise TypeError(f"{call}: {name} has no effect here; leave it out")
        elif name in _ELSEWHERE:
            if value is None or value is False:
                continue  # not asked for
            raise TypeError(f"{call} has no argument {name}; {_ELSEWHERE[name]}")
        else:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise TypeError(f"{call} has no argument {name}; {hint}")
