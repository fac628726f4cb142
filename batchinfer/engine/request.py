"""Requests to the engine, and its completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from batchinfer.config import MAX_BEAMS, SamplingParams
from batchinfer.engine.images import PromptImage
from batchinfer.engine.prompt_logprobs import PromptLogprobs
from batchinfer.engine.step import Float32, Int32, LogitsProcessor, LogprobsMode, UInt8
from batchinfer.protocols import Grammar, StopChecker, StopMatch

LARGEST_GROUP = MAX_BEAMS
"""Largest number of sequences of one request that must run together: the beams of a search."""

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt, and parameters for its continuation.

    ``rng_key`` is ``(seed, stream)``. A row with a seed in its sampling parameters has stream 0, so
    that equal rows with equal seeds get equal samples. For other rows, the seed is the
    job's and the stream is the row id.
    """

    row_id: int
    prompt_token_ids: TokenIds
    params: SamplingParams
    rng_key: tuple[int, int]
    eos_token_ids: frozenset[int] = frozenset()
    """The model's end-of-sequence ids; ``params.ignore_eos`` makes them ordinary tokens."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """``params.bad_words`` as token ids. If the output ends with all ids of a word but the last,
    the last id is banned."""
    make_stop_checker: Callable[[], StopChecker] | None = None
    """Makes a stop checker for one sample; None if there are no stop strings."""
    grammar: Grammar | None = None
    """Grammar of ``params.structured_outputs``; requires ``eos_token_ids``."""
    reused_prefix_len: int = 0
    """Number of leading prompt tokens that the row shares with a row that runs later."""
    branch_points: tuple[tuple[int, int], ...] = ()
    """Ascending pairs (P, N): N later rows diverge from this row after P prompt tokens. Used for
    models with recurrent state."""
    scored_from: int = 1
    """With ``params.prompt_logprobs``: index of the first prompt token to score."""
    images: tuple[PromptImage, ...] = ()
    """Images of the prompt, in order. Image tokens have negative ids."""
    prompt_embeds: UInt8 | None = None
    """[``num_prompt_tokens``, bytes of a vector] embeddings of the prompt in the model's dtype. The
    ids of such a prompt are negative; equal vectors have equal ids, and different vectors have
    different ids. None: the model embeds ``prompt_token_ids``."""
    first_sample: int = 0
    """Index of the first sample. If above 0, an earlier request of the row computed the prompt, and
    computing the prompt again counts as recomputation."""
    number: int = 0
    """Index of the request among the requests of its row."""
    given_token: int | None = None
    """If set, the request's only output token. The model scores this token and draws none."""
    adapter: int = 0
    """Number of the row's adapter; 0 = the base model."""
    pools: bool = False
    """True to return the hidden state of the last prompt token and ignore the output token."""
    pooling: tuple[str, ...] = ("lasttoken",)
    """With ``pools``: pooling modes. Modes other than the default need ``EncoderEngine``."""
    first_segment: int | None = None
    """For an encoder: number of tokens in the first text of a pair; None: a single text."""
    unpooled: int = 0
    """Number of leading prompt tokens that ``EncoderEngine`` excludes from pooling."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """The user's logits processors, in order. All run before masks, biases and penalties."""
    named_token_ids: tuple[int, ...] = ()
    """With ``params.logprobs``: ids whose log-probabilities are returned for each output token."""
    named_prompt_token_ids: Int32 | None = None
    """With ``params.prompt_logprobs``: [N, W] ids whose log-probabilities are returned for each of
    the N prompt tokens that start at ``scored_from``, padded with -1."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    key: bytes | None = None
    """Hash of all inputs that determine the output. An observer uses it to find the request's
    stored output in the next run. None: the output is not stored."""
    partial_output: PartialOutput | None = None
    """Output of an earlier run, from which the request continues."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def logits_from(self) -> int:
        """First position that needs logits. A prefix hit never includes this position."""
        last = self.num_prompt_tokens - 1
        return last if self.params.prompt_logprobs is None else min(self.scored_from - 1, last)

    @property
    def group_size(self) -> int:
        """Number of sequences that run together: the beam width, or 1."""
        return self.params.beam_width or 1

    @property
    def least_step_tokens(self) -> int:
        """Smallest value of ``max_num_batched_tokens`` with which the request can run."""
        spans = (span for each in self.images for span in each.whole_spans)
        return max(self.group_size, *(end - start for start, end in spans), 0)

    @property
    def num_draws(self) -> int:
        """Number of tokens drawn after the prompt: one per sample, or one for a beam search."""
        return 1 if self.params.beam_width else self.params.n

    @property
    def num_candidates(self) -> int:
        """Number of most likely tokens to return at each position; -1 = no log-probabilities.

        A beam search must find the same best candidates as transformers. If only stop tokens end a
        beam, ``beam_width`` other tokens of each beam suffice. With stop strings, any token may end
        a beam, so each beam needs ``num_beam_candidates`` tokens.
        """
        requested = -1 if self.params.logprobs is None else self.params.logprobs
        width = self.params.beam_width
        if width is None:
            return requested
        if self.make_stop_checker is None:
            return max(requested, width + len(self.beam_end_ids))
        return max(requested, self.num_beam_candidates)

    @property
    def num_beam_candidates(self) -> int:
        """Number of candidates, of all beams together, that one step of a beam search considers
        (transformers' ``beams_to_keep``)."""
        return self.group_size * max(2, 1 + len(self.beam_end_ids))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a sample, sorted."""
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        return tuple(sorted(eos | set(self.params.stop_token_ids)))

    @property
    def beam_end_ids(self) -> tuple[int, ...]:
        """Token ids that end a beam, sorted. With a grammar, end-of-sequence ids end a beam even
        with ``ignore_eos``."""
        eos = frozenset() if self.grammar is None else self.eos_token_ids
        return tuple(sorted(eos | set(self.stop_token_ids)))

    def named_stop(self, token_id: int) -> int | None:
        """Return the stop reason for a stop token: as in vLLM, None for an end-of-sequence id."""
        by_eos = token_id in self.eos_token_ids and not self.params.ignore_eos
        return None if by_eos else token_id


def beyond_vocabulary(request: Request, vocab_size: int | None) -> tuple[str, str] | None:
    """Return an error code and message if the model has no embedding for a token, else None."""
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
    """Log-probabilities at one position, from the model's unmodified logits.

    With a grammar, log-probabilities are normalized over the tokens that the grammar allows.
    ``LogprobsMode`` selects other values.
    """

    token_id: int
    logprob: float
    rank: int
    """Rank of the token by probability; the most likely token has rank 1."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most likely tokens, best first."""
    named: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the tokens that the request names."""


@dataclass(slots=True)
class SampleOutput:
    index: int
    token_ids: TokenIds
    finish_reason: str
    """``stop``, ``length`` or ``error``."""
    stop_reason: int | str | None
    """Stop token id or stop string; None for an end-of-sequence token."""
    stop_match: StopMatch | None
    cumulative_logprob: float
    logprobs: list[TokenLogprobs] | None
    score: float | None = None
    """Score of a beam search hypothesis; None for a sample that was drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class PartialSample:
    """Output so far of an unfinished sample or beam."""

    index: int
    """Index of the sample, or rank of the beam; 0 is the best beam."""
    token_ids: TokenIds
    cumulative_logprob: float
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True, slots=True, eq=False)
class PartialOutput:
    """Output so far of a request."""

    samples: tuple[PartialSample, ...]
    finished: tuple[SampleOutput, ...]
    """Finished samples; for an unfinished beam search, its hypotheses, best first."""
    stats: RequestStats


@dataclass(slots=True)
class RequestStats:
    """Statistics of a request, or of all requests of a row. Times are in milliseconds."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix index at first admission."""
    recomputed_tokens: int = 0
    preemptions: int = 0
    swapped_blocks: int = 0
    """Blocks copied from the host."""
    peak_blocks: int = 0
    """Largest number of distinct blocks that the request's sequences held at one time."""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    latency_ms: float = 0.0
    swap_preemptions: int = 0
    """Preemptions that kept the blocks, on the host if necessary."""
    deduplicated: int = 0
    """1 for a row that copied the output of an equal row; all its other counts are 0."""

    @property
    def has_run(self) -> bool:
        """True if the engine ran the request, false if it refused the request."""
        return self != RequestStats()


_COMBINE: Mapping[str, Callable[[Iterable[float]], float]] = {
    "peak_blocks": max,
    "queue_ms": min,
    "prefill_ms": max,
    "decode_ms": max,
    "latency_ms": max,
    "deduplicated": max,
}
"""Functions that combine statistics of a row's requests, keyed by field. Other fields are
summed."""


def combined_stats(requests: Sequence[RequestStats]) -> RequestStats | None:
    """Combine the statistics of a row's requests; return None if there are no requests.

    ``peak_blocks`` is the largest of the requests' peaks, which may be lower than the peak of the
    row.
    """
    if not requests:
        return None
    return RequestStats(
        **{
            entry.name: _COMBINE.get(entry.name, sum)(
                getattr(stats, entry.name) for stats in requests
            )
            for entry in fields(RequestStats)
        }
    )


@dataclass(slots=True)
class Completion:
    """A finished request: its samples in order, or an error.

    If a sample fails, the completion keeps the samples that finished earlier.
    """

    request: Request
    outputs: list[SampleOutput]
    error_code: str | None = None
    error_message: str | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities, starting at ``request.scored_from``; None if not requested or on error."""
    hidden_state: Float32 | None = None
    """With ``request.pools``: [H] hidden state of the last prompt token after the final norm, or
    hidden states pooled by ``request.pooling``."""
    judged: object = None
    """Verdicts on the row's samples up to this request, set by the caller."""

    def prompt_token_logprobs(self) -> list[TokenLogprobs] | None:
        """Return log-probabilities of the prompt's tokens, starting at ``scored_from``; None
        without ``prompt_logprobs``."""
        scores, request = self.prompt_logprobs, self.request
        if scores is None:
            return None
        return [
            TokenLogprobs(token_id, logprob, rank, tuple(zip(top_ids, top_logprobs, strict=True)))
            for token_id, logprob, rank, top_ids, top_logprobs in zip(
                request.prompt_token_ids[request.scored_from :].tolist(),
                scores.logprobs.tolist(),
                scores.ranks.tolist(),
                scores.top_token_ids.tolist(),
                scores.top_logprobs.tolist(),
                strict=True,
            )
        ]
