"""Sampling parameters of a call: checked against the model, and put into its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from batchinfer.config import sampling
from batchinfer.config.call_params import SamplingParams
from batchinfer.config.named_tokens import check_named_tokens, check_token_id_table
from batchinfer.config.sampling import MAX_LOGPROBS
from batchinfer.engine.request import Request
from batchinfer.engine.step import LogprobsMode
from batchinfer.llm.compatibility import settle
from batchinfer.llm.logits_processors import with_processors
from batchinfer.llm.prompts import kind_of, listed

MODES: Mapping[str, LogprobsMode] = {
    "raw_logprobs": LogprobsMode.RAW,
    "processed_logprobs": LogprobsMode.PROCESSED,
    "raw_logits": LogprobsMode.LOGITS,
    "processed_logits": LogprobsMode.PROCESSED | LogprobsMode.LOGITS,
}
"""By vLLM's names."""


def read_logprobs_mode(name: object) -> LogprobsMode:
    """What ``LLM(logprobs_mode=...)`` names.

    Raises:
        ValueError: it is not known.
    """
    if not isinstance(name, str) or name not in MODES:
        raise ValueError(f"logprobs_mode is {name!r}; it must be one of {', '.join(MODES)}")
    return MODES[name]


def check_priority(priority: int | Sequence[int] | None, count: int, call: str) -> None:
    """Check ``priority``, one for all prompts or one each, and warn that it has no effect.

    Raises:
        ValueError: they are not as many as the prompts.
    """
    if isinstance(priority, Sequence) and len(priority) != count:
        raise ValueError(f"{count} prompts, but {len(priority)} priorities")
    settle(call, {"priority": priority}, (), stacklevel=4)


def params_of_each(
    params: sampling.SamplingParams | Sequence[sampling.SamplingParams],
    count: int,
    vocab_size: int,
    max_logprobs: int | None,
    max_model_len: int,
) -> list[SamplingParams]:
    """The sampling parameters of each of ``count`` prompts.

    Args:
        max_logprobs: most alternatives that may be asked for; -1 = any number; None: 20, or all.

    Raises:
        TypeError, ValueError: they are something else, not as many, ask for too much, or name a
            token id that the model does not have.
    """
    if isinstance(params, sampling.SamplingParams):
        distinct = [SamplingParams.of(params)]
        found = distinct * count
    else:
        expected = "SamplingParams(...), or a list of one for each prompt"
        given = listed(params, "sampling_params", expected)
        if len(given) != count:
            raise ValueError(f"{count} prompts, but {len(given)} sampling params")
        for at, one in enumerate(given):
            if not isinstance(one, sampling.SamplingParams):
                raise TypeError(f"sampling_params {at} is {kind_of(one)}; give SamplingParams(...)")
        distinct = found = [SamplingParams.of(one) for one in given]
    for one in distinct:
        one.check_token_ids(vocab_size)
        one.check_call()
        _check_logprobs(one, vocab_size, max_logprobs, max_model_len)
        settle("SamplingParams", one.without_effect(), (), stacklevel=6)
    return found


def _check_logprobs(
    params: SamplingParams, vocab_size: int, max_logprobs: int | None, max_model_len: int
) -> None:
    most = MAX_LOGPROBS if max_logprobs is None else max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name) or 0
        is_over = max_logprobs is not None if wanted == -1 else wanted > most
        if most != -1 and is_over:
            raise ValueError(
                f"{name} is {wanted}, more than max_logprobs, which is {most}; "
                "give LLM(max_logprobs=...), -1 for any number"
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


def as_called(
    requests: Sequence[Request], params: SamplingParams, mode: LogprobsMode
) -> list[Request]:
    """The requests of a prompt with what only calls from Python ask for.

    Args:
        mode: what is given as log-probabilities.
    """
    named = params.logprob_token_ids or ()
    table, scored_from = params.prompt_logprob_token_ids, 1
    if table is not None:
        skipped = params.prompt_logprob_start or 0
        if params.prompt_logprobs is None:
            scored_from += skipped
        else:
            table = np.pad(table, ((skipped, 0), (0, 0)), constant_values=-1)
    if mode == LogprobsMode.RAW and not named and table is None:
        return with_processors(requests, params.logits_processors)
    asked = [
        replace(
            request,
            named_token_ids=named,
            named_prompt_token_ids=table,
            scored_from=scored_from,
            logprobs_mode=mode,
        )
        for request in requests
    ]
    return with_processors(asked, params.logits_processors)


def rows_to_score_problem(params: SamplingParams, num_prompt_tokens: int) -> str | None:
    """Why ``prompt_logprob_token_ids`` do not go with a prompt; None if they do."""
    table, skipped = params.prompt_logprob_token_ids, params.prompt_logprob_start or 0
    wanted = max(num_prompt_tokens - 1 - skipped, 0)
    if table is None or len(table) == wanted:
        return None
    return (
        f"prompt_logprob_token_ids has {len(table)} rows, but the prompt of {num_prompt_tokens} "
        f"tokens has {wanted} scored rows: one for each token but the first"
        + (f" and the {skipped} of prompt_logprob_start" if skipped else "")
    )
