"""Requests to the engine, and the completions it gives back."""

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
"""Most sequences that a request runs together."""

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One row: a prompt and how to continue it.

    ``rng_key`` is ``(seed, stream)``: the job's seed with the row id as the stream, or a row's
    own seed with stream 0 (so that equal rows with equal seeds get equal samples).
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
    """Makes a checker for each sample; None where the row has no stop strings."""
    grammar: Grammar | None = None
    """Grammar of ``params.structured_outputs``; such a row has ``eos_token_ids``."""
    reused_prefix_len: int = 0
    """Prompt tokens that a row after it, in the order they run, begins with as well."""
    scored_from: int = 1
    """With ``params.prompt_logprobs``: the first prompt token whose log-probability is wanted."""
    first_sample: int = 0
    """Index of its first sample: further ones of a row begin where those before it end, and
    computing the row's prompt for them counts as recomputing it."""
    number: int = 0
    """Number of the request among those of a row that has several."""
    given_token: int | None = None
    """Its one output token, whatever the logits say: scoring asks how likely it was."""
    adapter: int = 0
    """Number of the adapter that the row runs through; 0 = the base model alone."""
    pools: bool = False
    """Whether the hidden state of its last prompt token is wanted; its output means nothing."""
    pooling: tuple[str, ...] = ("lasttoken",)
    """With ``pools``: how hidden states become a vector; others are an ``EncoderEngine``'s."""
    first_segment: int | None = None
    """Of a pair of texts that an encoder reads: prompt tokens of the first; None: there is one."""
    unpooled: int = 0
    """Of what an ``EncoderEngine`` pools: first prompt tokens that are left out."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """What a caller does to the logits before all else, one after another."""
    named_token_ids: tuple[int, ...] = ()
    """With ``params.logprobs``: ids whose log-probabilities are given besides, at each token."""
    named_prompt_token_ids: Int32 | None = None
    """With ``params.prompt_logprobs``: [N, W] the same of the N prompt tokens from ``scored_from``
    on; -1 pads."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    """What is given as log-probabilities."""
    key: bytes | None = None
    """Hash of all that decides what is drawn, by which an observer of the engine knows it in the
    next run; None: nobody keeps what it draws."""
    partial_output: PartialOutput | None = None
    """What an earlier run drew of it before it ended: it goes on from there."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt_token_ids)

    @property
    def logits_from(self) -> int:
        """The first position whose logits are needed; no block that holds it is taken over."""
        last = self.num_prompt_tokens - 1
        return last if self.params.prompt_logprobs is None else min(self.scored_from - 1, last)

    @property
    def group_size(self) -> int:
        """Sequences that run together: the beams of a search, else one."""
        return self.params.beam_width or 1

    @property
    def num_draws(self) -> int:
        """Tokens drawn after the prompt: one for each sample; a search begins with one beam."""
        return 1 if self.params.beam_width else self.params.n

    @property
    def num_candidates(self) -> int:
        """Most likely tokens wanted at each position; -1 = no log-probabilities at all.

        For a search, as many as make sure of ``beam_width`` that do not end the beam. Together
        the beams' hold every candidate that transformers would look at.
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
        """Token ids that end a beam, sorted; nothing goes on behind the end of a grammar."""
        eos = frozenset() if self.grammar is None else self.eos_token_ids
        return tuple(sorted(eos | set(self.stop_token_ids)))

    def named_stop(self, token_id: int) -> int | None:
        """The stop reason of a stop token: as in vLLM, only one that the user named is."""
        by_eos = token_id in self.eos_token_ids and not self.params.ignore_eos
        return None if by_eos else token_id


def beyond_vocabulary(request: Request, vocab_size: int | None) -> tuple[str, str] | None:
    """Error code and message of a request of a token id that the model has no embedding for;
    None: it has none.

    Args:
        vocab_size: the model's token ids are below it; None: nobody knows.
    """
    highest = max(int(request.prompt_token_ids.max()), request.given_token or 0)
    if vocab_size is None or highest < vocab_size:
        return None
    return (
        "unsupported_content",
        f"the tokenizer makes token {highest} of the text, and the model's token ids end at "
        f"{vocab_size - 1}; take the tokenizer that belongs to the model, or leave that token out",
    )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position, from the model's unmodified logits.

    They are among the tokens that the row's grammar allows, if it has one.
    """

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...]
    """The most likely tokens, best first: (token id, log-probability)."""
    named: tuple[tuple[int, float], ...] = ()
    """Those that were asked for by id."""


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
    """End of the text, if a stop string ended it."""
    cumulative_logprob: float
    logprobs: list[TokenLogprobs] | None
    score: float | None = None
    """Score that beams are ranked by; None without beam search."""


@dataclass(frozen=True, slots=True, eq=False)
class PartialSample:
    """One unfinished sample of a row, or one of its beams, as far as it has come."""

    index: int
    """Index of the sample; of beams: rank, best first."""
    token_ids: TokenIds
    cumulative_logprob: float
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True, slots=True, eq=False)
class PartialOutput:
    """A request's output as far as it has come."""

    samples: tuple[PartialSample, ...]
    finished: tuple[SampleOutput, ...]
    """Finished samples; of a beam search that goes on: its finished hypotheses, best first."""
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
    """Preemptions after which what was computed was kept, on the host if need be."""
    deduplicated: int = 0
    """1 for a row whose outputs are copied from an equal one, and nothing else."""

    @property
    def has_run(self) -> bool:
        """Whether anything was computed for the request; the engine refuses some."""
        return self != RequestStats()


_COMBINE: Mapping[str, Callable[[Iterable[float]], float]] = {
    "peak_blocks": max,
    "queue_ms": min,
    "prefill_ms": max,
    "decode_ms": max,
    "latency_ms": max,
    "deduplicated": max,
}
"""How statistics of a row's requests make those of the row, where not by their sum."""


def combined_stats(requests: Sequence[RequestStats]) -> RequestStats | None:
    """Statistics of a row from those of its requests.

    Blocks that they share count once, so the most that one of them held is the least that the row
    did.
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
    """A request the engine is done with: its samples in order, or an error.

    Samples that finished before another failed are kept beside the error.
    """

    request: Request
    outputs: list[SampleOutput]
    error_code: str | None = None
    error_message: str | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities from ``request.scored_from`` on, if asked for and nothing failed."""
    hidden_state: Float32 | None = None
    """[H] of the last prompt token, after the body's final norm, or pooled as ``request.pooling``
    says; with ``request.pools``."""
    judged: object = None
    """Verdicts on the samples of its row up to its own, by whoever judges them."""

    def prompt_token_logprobs(self) -> list[TokenLogprobs] | None:
        """Log-probabilities of the prompt's tokens, from ``scored_from`` on, each with its token;
        None without ``prompt_logprobs``."""
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
