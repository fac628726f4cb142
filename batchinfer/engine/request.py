"""Requests to the engine, and its completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from batchinfer.config import MAX_BEAMS, SamplingParams
from batchinfer.engine.prompt_logprobs import PromptLogprobs
from batchinfer.engine.step import Float32, Int32, LogitsProcessor, LogprobsMode
from batchinfer.protocols import Grammar, StopChecker, StopMatch

LARGEST_GROUP = MAX_BEAMS
"""Most sequences that one request runs together."""

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt and how to continue it.

    ``rng_key`` is ``(seed, stream)``: the job's seed with the row id as the stream, or a row's own
    seed with stream 0, so that equal rows with equal seeds get equal samples.
    """

    row_id: int
    prompt_token_ids: TokenIds
    params: SamplingParams
    rng_key: tuple[int, int]
    eos_token_ids: frozenset[int] = frozenset()
    """The model's end-of-sequence ids; ``params.ignore_eos`` makes them ordinary tokens."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """``params.bad_words`` as token ids; the last id of each is banned after the others."""
    make_stop_checker: Callable[[], StopChecker] | None = None
    """Makes a checker for each sample; None without stop strings."""
    grammar: Grammar | None = None
    """Grammar of ``params.structured_outputs``; requires ``eos_token_ids``."""
    reused_prefix_len: int = 0
    """Leading prompt tokens that a later row in the running order shares."""
    branch_points: tuple[tuple[int, int], ...] = ()
    """Prompt lengths, ascending, at which later rows part from this one, and the number of rows
    that will start from each; for models with recurrent state."""
    scored_from: int = 1
    """With ``params.prompt_logprobs``: the first prompt token to score."""
    first_sample: int = 0
    """Index of the first sample; above 0 for further samples of a row, whose prompt then counts as
    recomputed."""
    number: int = 0
    """Number of the request within its row."""
    given_token: int | None = None
    """The fixed only output token, to score how likely it is."""
    adapter: int = 0
    """Number of the row's adapter; 0 = the base model."""
    pools: bool = False
    """Whether to return the hidden state of the last prompt token; the output is not used."""
    pooling: tuple[str, ...] = ("lasttoken",)
    """With ``pools``: pooling modes; only ``EncoderEngine`` supports others than this one."""
    first_segment: int | None = None
    """Prompt tokens of the first text of a pair, for an encoder; None: a single text."""
    unpooled: int = 0
    """Leading prompt tokens that ``EncoderEngine`` leaves out of pooling."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """The caller's functions on logits, applied first and in order."""
    named_token_ids: tuple[int, ...] = ()
    """With ``params.logprobs``: ids whose log-probabilities are returned at each token."""
    named_prompt_token_ids: Int32 | None = None
    """With ``params.prompt_logprobs``: [N, W] the same for the N prompt tokens from ``scored_from``
    on, padded with -1."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    key: bytes | None = None
    """Hash of everything that decides the output, by which an observer recognizes the request in
    the next run; None: its output is not stored."""
    partial_output: PartialOutput | None = None
    """Output of an earlier run, to continue from."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt_token_ids)

    @property
    def logits_from(self) -> int:
        """The first position whose logits are needed; a prefix hit ends before it."""
        last = self.num_prompt_tokens - 1
        return last if self.params.prompt_logprobs is None else min(self.scored_from - 1, last)

    @property
    def group_size(self) -> int:
        """Sequences that run together: the beams of a search, or 1."""
        return self.params.beam_width or 1

    @property
    def num_draws(self) -> int:
        """Tokens drawn after the prompt: one per sample; a search starts with one beam."""
        return 1 if self.params.beam_width else self.params.n

    @property
    def num_candidates(self) -> int:
        """Number of most likely tokens needed at each position; -1 = no log-probabilities.

        For a search, enough for ``beam_width`` tokens that do not end the beam. The beams together
        then have every candidate that transformers considers.
        """
        if self.params.beam_width:
            return self.params.beam_width + len(self.beam_end_ids)
        return -1 if self.params.logprobs is None else self.params.logprobs

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a sample of this row, sorted."""
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        return tuple(sorted(eos | set(self.params.stop_token_ids)))

    @property
    def beam_end_ids(self) -> tuple[int, ...]:
        """Token ids that end a beam, sorted; a grammar's end is always final."""
        eos = frozenset() if self.grammar is None else self.eos_token_ids
        return tuple(sorted(eos | set(self.stop_token_ids)))

    def named_stop(self, token_id: int) -> int | None:
        """The stop reason for a stop token; as in vLLM, None unless the user named the token."""
        by_eos = token_id in self.eos_token_ids and not self.params.ignore_eos
        return None if by_eos else token_id


def beyond_vocabulary(request: Request, vocab_size: int | None) -> tuple[str, str] | None:
    """Error code and message if a request has a token id without an embedding, else None.

    Args:
        vocab_size: upper bound of the model's token ids; None: unknown.
    """
    highest = max(int(request.prompt_token_ids.max()), request.given_token or 0)
    if vocab_size is None or highest < vocab_size:
        return None
    return (
        "unsupported_content",
        f"the text contains token {highest}, but the model's token ids end at {vocab_size - 1}; "
        "use the model's own tokenizer, or remove that token",
    )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position, from the model's unmodified logits.

    With a grammar they are normalized over the tokens that it allows.
    """

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...]
    """The most likely tokens, best first: (token id, log-probability)."""
    named: tuple[tuple[int, float], ...] = ()
    """Tokens requested by id: (token id, log-probability)."""


@dataclass(slots=True)
class SampleOutput:
    """One finished sample of a row."""

    index: int
    token_ids: TokenIds
    finish_reason: str
    """``stop``, ``length`` or ``error``."""
    stop_reason: int | str | None
    """The stop token id (None for an end-of-sequence token) or the stop string."""
    stop_match: StopMatch | None
    """The stop string that ended the text, if one did."""
    cumulative_logprob: float
    logprobs: list[TokenLogprobs] | None
    score: float | None = None
    """Score of a beam; None without beam search."""


@dataclass(frozen=True, slots=True, eq=False)
class PartialSample:
    """The output so far of an unfinished sample or beam."""

    index: int
    """Index of the sample, or rank of the beam, best first."""
    token_ids: TokenIds
    cumulative_logprob: float
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True, slots=True, eq=False)
class PartialOutput:
    """A request's output so far."""

    samples: tuple[PartialSample, ...]
    finished: tuple[SampleOutput, ...]
    """Finished samples; for an unfinished beam search its finished hypotheses, best first."""
    stats: RequestStats


@dataclass(slots=True)
class RequestStats:
    """Statistics of a row; times in milliseconds."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix index at first admission."""
    recomputed_tokens: int = 0
    preemptions: int = 0
    swapped_blocks: int = 0
    """Blocks copied from the host."""
    peak_blocks: int = 0
    """Most distinct blocks held by the row's sequences at one time."""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    latency_ms: float = 0.0
    swap_preemptions: int = 0
    """Preemptions whose blocks were kept, on the host if needed."""
    deduplicated: int = 0
    """1 for a row whose outputs are copied from an equal row, which counts nothing else."""

    @property
    def has_run(self) -> bool:
        """Whether anything was computed; False for refused requests."""
        return self != RequestStats()


_COMBINE: Mapping[str, Callable[[Iterable[float]], float]] = {
    "peak_blocks": max,
    "queue_ms": min,
    "prefill_ms": max,
    "decode_ms": max,
    "latency_ms": max,
    "deduplicated": max,
}
"""How to combine statistics of a row's requests, if not by their sum."""


def combined_stats(requests: Sequence[RequestStats]) -> RequestStats | None:
    """Statistics of a row from those of its requests.

    ``peak_blocks`` is the maximum, a lower bound, as the requests may share blocks.
    """
    if not requests:
        return None
    return RequestStats(
        **{
            entry.name: _COMBINE.get(entry.name, sum)(getattr(one, entry.name) for one in requests)
            for entry in fields(RequestStats)
        }
    )


@dataclass(slots=True)
class Completion:
    """A finished request: its samples in order, or an error.

    Samples that finished before another one failed are kept.
    """

    request: Request
    outputs: list[SampleOutput]
    error_code: str | None = None
    error_message: str | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities from ``request.scored_from`` on, if requested and nothing failed."""
    hidden_state: Float32 | None = None
    """With ``request.pools``: [H] of the last prompt token after the final norm, or pooled by
    ``request.pooling``."""
    judged: object = None
    """Verdicts on the row's samples up to this request, set by the caller."""

    def prompt_token_logprobs(self) -> list[TokenLogprobs] | None:
        """Log-probabilities of the prompt's tokens from ``scored_from`` on; None without
        ``prompt_logprobs``."""
        found, request = self.prompt_logprobs, self.request
        if found is None:
            return None
        return [
            TokenLogprobs(token_id, logprob, rank, tuple(zip(top_ids, top_logprobs, strict=True)))
            for token_id, logprob, rank, top_ids, top_logprobs in zip(
                request.prompt_token_ids[request.scored_from :].tolist(),
                found.logprobs.tolist(),
                found.ranks.tolist(),
                found.top_token_ids.tolist(),
                found.top_logprobs.tolist(),
                strict=True,
            )
        ]
