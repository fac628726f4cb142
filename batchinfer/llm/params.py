"""Checks the sampling parameters of a call against the model, and adds them to requests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from batchinfer.config.call_params import SamplingParams
from batchinfer.config.named_tokens import check_named_tokens, check_token_id_table
from batchinfer.config.sampling import MAX_LOGPROBS
from batchinfer.engine.request import Request
from batchinfer.engine.step import LogitsProcessor, LogprobsMode
from batchinfer.llm.compatibility import settle

MODES: Mapping[str, LogprobsMode] = {
    "raw_logprobs": LogprobsMode.RAW,
    "processed_logprobs": LogprobsMode.PROCESSED,
    "raw_logits": LogprobsMode.LOGITS,
    "processed_logits": LogprobsMode.PROCESSED | LogprobsMode.LOGITS,
}


def read_logprobs_mode(name: object) -> LogprobsMode:
    """Return the mode that ``LLM(logprobs_mode=...)`` names.

    Raises:
        ValueError: the mode is unknown.
    """
    if not isinstance(name, str) or name not in MODES:
        raise ValueError(f"logprobs_mode is {name!r}; it must be one of {', '.join(MODES)}")
    return MODES[name]


def check_params(
    params: SamplingParams, vocab_size: int, max_logprobs: int | None, max_model_len: int
) -> None:
    """Check the parameters of a call against the model, and warn about unused parameters.

    Args:
        max_logprobs: ``LLM(max_logprobs=...)``.

    Raises:
        ValueError: too many log-probabilities, or a token id outside the vocabulary.
    """
    params.check_token_ids(vocab_size)
    params.check_call()
    most = MAX_LOGPROBS if max_logprobs is None else max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name) or 0
        is_over = max_logprobs is not None if wanted == -1 else wanted > most
        if most != -1 and is_over:
            raise ValueError(
                f"{name} is {wanted}, but max_logprobs is {most}; raise "
                "LLM(max_logprobs=...), or set it to -1 for any number"
            )
    check_named_tokens(params.logprob_token_ids or (), "logprob_token_ids", vocab_size)
    if params.prompt_logprob_token_ids is not None:
        check_token_id_table(
            params.prompt_logprob_token_ids,
            "prompt_logprob_token_ids",
            vocab_size=vocab_size,
            most_ids=vocab_size if most == -1 else most,
            max_model_len=max_model_len,
        )
    settle("SamplingParams", params.without_effect(), (), stacklevel=6)


def as_called(
    requests: Sequence[Request], params: SamplingParams, mode: LogprobsMode
) -> Sequence[Request]:
    """Return a prompt's requests with the call's options that only the Python API has."""
    named, processors = params.logprob_token_ids or (), params.logits_processors or ()
    table, scored_from = params.prompt_logprob_token_ids, 1
    if mode == LogprobsMode.RAW and not named and table is None and not processors:
        return requests
    if table is not None:
        skipped = params.prompt_logprob_start or 0
        if params.prompt_logprobs is None:
            scored_from += skipped
        else:
            table = np.pad(table, ((skipped, 0), (0, 0)), constant_values=-1)
    return [
        replace(
            request,
            named_token_ids=named,
            named_prompt_token_ids=table,
            scored_from=scored_from,
            logprobs_mode=mode,
            logits_processors=tuple(map(_with_prompt, processors)),
        )
        for request in requests
    ]


def _with_prompt(processor: Callable[..., Any]) -> LogitsProcessor:
    """Return a logits processor that also takes the prompt's token ids.

    Args:
        processor: function of (output token ids, logits), or of (prompt token ids, output token
            ids, logits).

    Raises:
        TypeError: ``processor`` takes neither two nor three arguments.
    """
    if not callable(processor):
        raise TypeError(f"logits_processors contains {processor!r}; every entry must be a function")
    name = getattr(processor, "__name__", type(processor).__name__)
    if _takes(processor, 3):
        return processor
    if not _takes(processor, 2):
        raise TypeError(
            f"logits processor {name} must take (output token ids, logits) or "
            "(prompt token ids, output token ids, logits)"
        )

    def without_prompt(_: list[int], output_token_ids: list[int], logits: Any) -> Any:
        return processor(output_token_ids, logits)

    without_prompt.__name__ = name
    return without_prompt


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


def rows_to_score_problem(params: SamplingParams, num_prompt_tokens: int) -> str | None:
    """Return why ``prompt_logprob_token_ids`` does not match the prompt; None if it matches."""
    table, skipped = params.prompt_logprob_token_ids, params.prompt_logprob_start or 0
    wanted = max(num_prompt_tokens - 1 - skipped, 0)
    if table is None or len(table) == wanted:
        return None
    return (
        f"prompt_logprob_token_ids has {len(table)} rows, but the prompt of "
        f"{num_prompt_tokens} tokens needs {wanted}: one for each token "
        "except the first"
        + (f" and the {skipped} tokens that prompt_logprob_start skips" if skipped else "")
    )
