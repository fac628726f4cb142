"""Results of the Python API: outputs made of completions, and ``LLM.stats`` as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from batchinfer.config import SamplingParams
from batchinfer.engine.request import Completion, Request, SampleOutput, TokenLogprobs
from batchinfer.errors import RowError
from batchinfer.text.detokenize import MAX_CHAR_TOKENS, output_text, token_text
from batchinfer.text.prompts import Prompt
from batchinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of ``LLM.beam_search``; names as vLLM's."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Ignored."""
    length_penalty: float = 1.0

    def sampling(self) -> SamplingParams:
        """Sampling parameters of a row that gets all of its beams.

        Raises:
            TypeError, ValueError: naming the field, when a value is not what it must be.
        """
        return SamplingParams(
            n=self.beam_width,
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
        )


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int | None
    decoded_token: str | None
    """What the token adds to the text: of a character in several tokens, the last adds all."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    """``stop``, ``length`` or ``error``."""
    stop_reason: int | str | None
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None
    score: float | None = None
    """What beams are ranked by; None without beam search."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its samples. A prompt that could not be run has none, and an ``error``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """Each prompt token's, if asked for; None for the first, which nothing comes before."""
    num_cached_tokens: int
    finished: bool
    outputs: list[CompletionOutput]
    error: RowError | None = None


def refused(request_id: str, error: RowError) -> RequestOutput:
    """The output of a prompt that never ran."""
    return RequestOutput(request_id, None, [], None, 0, True, [], error)


def finished(
    request_id: str, completion: Completion, prompt: Prompt, tokenizer: Tokenizer
) -> RequestOutput:
    """The output of a prompt that the engine is done with."""
    request = completion.request
    output = RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=request.prompt_token_ids.tolist(),
        prompt_logprobs=_prompt_logprobs(completion, tokenizer),
        num_cached_tokens=completion.stats.cached_tokens,
        finished=True,
        outputs=[_sample(sample, request, tokenizer) for sample in completion.outputs],
    )
    if completion.error_code is None:
        return output
    return replace(output, error=RowError(completion.error_code, completion.error_message or ""))


def _sample(sample: SampleOutput, request: Request, tokenizer: Tokenizer) -> CompletionOutput:
    token_ids = sample.token_ids.tolist()
    before = request.prompt_token_ids[-MAX_CHAR_TOKENS:].tolist()
    return CompletionOutput(
        index=sample.index,
        text=output_text(tokenizer, sample, request.params),
        token_ids=token_ids,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        cumulative_logprob=sample.cumulative_logprob,
        logprobs=None
        if sample.logprobs is None
        else _logprobs(sample.logprobs, before + token_ids, tokenizer),
        score=sample.score,
    )


def _prompt_logprobs(
    completion: Completion, tokenizer: Tokenizer
) -> list[dict[int, Logprob] | None] | None:
    tokens = completion.prompt_token_logprobs()
    if tokens is None:
        return None
    return [None, *_logprobs(tokens, completion.request.prompt_token_ids.tolist(), tokenizer)]


def _logprobs(
    tokens: Sequence[TokenLogprobs], text: list[int], tokenizer: Tokenizer
) -> list[dict[int, Logprob]]:
    """Each token's alternatives, best first, and the token itself, by token id.

    Args:
        text: ids of ``tokens`` and of those before them, ``MAX_CHAR_TOKENS`` or all.
    """
    first = len(text) - len(tokens)
    return [
        _token_logprobs(token, text[max(at - MAX_CHAR_TOKENS, 0) : at], tokenizer)
        for at, token in enumerate(tokens, start=first)
    ]


def _token_logprobs(
    token: TokenLogprobs, before: list[int], tokenizer: Tokenizer
) -> dict[int, Logprob]:
    entries = {
        token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(token.top, start=1)
    }
    entries.setdefault(token.token_id, (token.logprob, token.rank))
    return {
        token_id: Logprob(logprob, rank, token_text(tokenizer, token_id, before))
        for token_id, (logprob, rank) in entries.items()
    }


class Stats(dict[str, dict[str, float]]):
    """``tokens``, ``throughput`` and ``kv`` of ``summary.json``; in a notebook, a table."""

    def __repr__(self) -> str:
        lines: list[str] = []
        for section, values in self.items():
            lines += [section, *(f"  {name:<22}{_said(name, n):>14}" for name, n in values.items())]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The stats as a table, for notebooks."""
        rows = "".join(
            f"<tr><th colspan=2 style='text-align:left'>{escape(section)}</th></tr>"
            + "".join(
                f"<tr><td style='text-align:left'>{escape(name)}</td><td>{_said(name, n)}</td></tr>"
                for name, n in values.items()
            )
            for section, values in self.items()
        )
        return f"<table>{rows}</table>"


def _said(name: str, value: float) -> str:
    if "per_s" in name:
        return f"{value:,.1f}"
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"
