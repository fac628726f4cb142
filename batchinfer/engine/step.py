"""Data-only messages between the control plane and the worker.

A ``Step`` is the input of one forward pass, a ``StepResult`` its output; both are structs of numpy
arrays. S = sequences in the step, T = tokens computed, R = rows of logits, K = samples drawn
(K >= R: after the prompt, a request's n samples draw from the same row of logits).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import IntFlag
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from batchinfer.engine.images import StepImage

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]
UInt8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Sampling parameters, one value for each row of a table or each of K samples.

    Every field of this class is passed from ``SamplingParams`` to the sampler under its own name.
    """

    temperature: Float32  # 0 = most likely token
    top_p: Float32
    top_k: Int32  # 0 = all
    min_p: Float32
    presence_penalty: Float32
    frequency_penalty: Float32
    repetition_penalty: Float32
    seed: UInt64
    stream: UInt64  # the row's random stream
    sample_index: Int32
    num_logprobs: Int32  # alternatives; -1 = no logprobs

    DISTRIBUTION: ClassVar = ("temperature", "top_p", "top_k", "min_p")
    """Samples that draw from the same row of logits share a distribution if these columns agree."""

    @classmethod
    def zeros(cls, count: int) -> Self:
        return cls(**{name: np.zeros(count, dtype) for name, dtype in _COLUMN_DTYPES.items()})

    def set_row(self, row: int, params: object, **derived: float) -> None:
        """Fill a row. A column's value comes from ``derived`` if it is given there, else from
        ``params``."""
        for name in _COLUMN_DTYPES:
            value = derived[name] if name in derived else getattr(params, name)
            getattr(self, name)[row] = value

    def take(self, rows: npt.NDArray[np.integer]) -> dict[str, npt.NDArray[Any]]:
        """Return the values of some rows, keyed by column name."""
        return {name: getattr(self, name)[rows] for name in _COLUMN_DTYPES}


_DTYPES = {"Float32": np.float32, "Int32": np.int32, "UInt64": np.uint64}
_COLUMN_DTYPES = {column.name: _DTYPES[str(column.type)] for column in fields(SamplingColumns)}
"""Dtypes of the columns, from their annotations, which are strings."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """Tokens to penalize, for the P samples with penalties, padded with -1."""

    samples: Int32  # [P] index into the K samples
    prompt_token_ids: Int32  # [P, longest prompt]
    output_token_ids: Int32  # [P, longest output so far]


class LogprobsMode(IntFlag):
    RAW = 0
    """Log-probabilities from the unmodified logits."""
    LOGITS = 1
    """The logits themselves."""
    PROCESSED = 2
    """Values after biases, bans, penalties, temperature and filters; -inf for excluded tokens.
    Values of prompt tokens are never processed."""
    EDITED = 4
    """Log-probabilities from the unmodified logits, to which biases, bans and penalties are then
    applied as if to logits, without normalizing again. Beam search sums these values."""


LogitsProcessor = Callable[..., Any]
"""A user's function that returns logits. The function's arguments are the token ids of the prompt
and of the output (lists), and the next token's logits (float32 [V] on the model's device)."""


@dataclass(frozen=True, slots=True)
class ProcessedRow:
    """A row of logits and the user's logits processors, which run before masks and penalties."""

    row: int
    processors: tuple[LogitsProcessor, ...]
    prompt_token_ids: list[int]
    output_token_ids: list[int]


def _no_rows() -> Int32:
    return np.empty(0, dtype=np.int32)


def _no_masks() -> Int32:
    return np.empty((0, 0), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class SamplingBatch(SamplingColumns):
    """Parameters of the K samples that a step draws from its R rows of logits."""

    logits_rows: Int32  # [K] row of logits that each sample draws from
    position: Int32  # [K] number of output tokens that the sample has already
    penalties: Penalties | None
    bias_samples: Int32  # [B] biases of logits: sample, token id, value (-inf bans the token)
    bias_token_ids: Int32  # [B]
    bias_values: Float32  # [B]
    allowed_samples: Int32  # [A] samples that may only draw their ``allowed_token_ids``
    allowed_token_ids: Int32  # [A]
    given_token_ids: Int32 | None = None  # [K] fixed tokens; -1: draw a token; None: draw all
    masked_rows: Int32 = field(default_factory=_no_rows)  # [M] rows of logits with a grammar
    masks: Int32 = field(
        default_factory=_no_masks
    )  # [M, words] bit i % 32 of word i // 32 allows token i
    processed: tuple[ProcessedRow, ...] = ()
    named_token_ids: Int32 | None = None  # [K, W] ids that get log-probabilities, padded with -1
    logprobs_modes: Int32 | None = None  # [K] ``LogprobsMode``; None: all RAW


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The P prompt tokens that a step scores."""

    rows: Int32  # [P] index of the packed token whose logits predict each scored token
    token_ids: Int32  # [P]
    num_logprobs: Int32  # [P] alternatives
    named_token_ids: Int32 | None = None  # [P, W] ids that get log-probabilities, padded with -1
    as_logits: Bool | None = None  # [P] return logits, not log-probabilities; None: all False


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Prefix tree of a step's sequences, encoded as an ordering of the sequences.

    Shared prefixes consist of whole blocks that earlier steps computed. Every token of the step
    therefore attends to the whole shared prefix of its sequence. The sequences ``order[i]`` and
    ``order[j]``, i < j, share ``min(shared_lens[i + 1 : j + 1])`` tokens.
    """

    order: Int32  # [S] the step's sequences; those with a common prefix are adjacent
    shared_lens: Int32  # [S] leading tokens shared with the previous sequence in ``order``


def _no_pairs() -> Int32:
    return np.empty((0, 2), dtype=np.int32)


def _no_tables() -> Int32:
    return np.empty((0, 0, 0), dtype=np.int32)


def _no_slots() -> Int64:
    return np.empty((0, 0), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class StepEmbeds:
    """Prompt tokens of a step that are given as embeddings instead of ids."""

    first: int  # index of the first of these tokens among the packed tokens
    vectors: UInt8  # [t, bytes of a vector] embeddings in the model's dtype


@dataclass(frozen=True, slots=True)
class Step:
    """Input of one forward pass, with sequences packed into one row of tokens.

    Blocks are copied first: ``swap_outs``, then ``swap_ins``, then ``block_copies``, each in order.
    ``block_tables`` and ``slot_mapping`` belong to the first layer group; most models have only one
    group (G = 1).
    """

    token_ids: Int32  # [T]
    previous_sample: Int32  # [T] use this sample of the previous step; -1 = use token_ids
    positions: Int32  # [T] rotary position of each token
    query_starts: Int32  # [S + 1] start of each sequence's tokens in the packed row
    context_lens: Int32  # [S] number of each sequence's tokens with KV after this step
    block_tables: Int32  # [S, longest table] device slots; undefined outside a sequence's window
    slot_mapping: Int64  # [T] slot * block_size + offset where each token's KV is written
    block_copies: Int32  # [C, 2] (source slot, destination slot) on the device
    logits_indices: Int32  # [R] indices of the packed tokens whose logits are needed
    sampling: SamplingBatch
    shared_prefixes: SharedPrefixes | None = None  # None: no shared prefix is long enough
    swap_outs: Int32 = field(default_factory=_no_pairs)  # [O, 2] (device slot, host slot)
    swap_ins: Int32 = field(default_factory=_no_pairs)  # [I, 2] (host slot, device slot)
    other_tables: Int32 = field(default_factory=_no_tables)  # [G - 1, S, longest table]
    other_slots: Int64 = field(default_factory=_no_slots)  # [G - 1, T] as slot_mapping
    state_tables: Int32 = field(default_factory=_no_pairs)  # [S, slots of a recurrent state]
    scored: ScoredTokens | None = None  # None: no prompt tokens are scored
    pooled: Int32 | None = None  # [E] indices of packed tokens whose hidden states are returned
    images: tuple[StepImage, ...] = ()  # image tokens of the step
    prompt_embeds: tuple[StepEmbeds, ...] = ()  # tokens given as embeddings
    grid_positions: Int32 | None = None  # [3, T] in place of positions, for images with grids
    query_ends: Int32 | None = None  # [T] one past the last position that each token sees; None:
    # each token sees up to itself
    prompt_lens: Int32 | None = None  # [S] prompt tokens of each sequence; None: all are prompt
    adapters: Int32 | None = None  # [S] number of each sequence's adapter, 0 = none; None: all 0

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_samples(self) -> int:
        return len(self.sampling.logits_rows)

    def tables_of(self, group: int) -> Int32:
        """Return the block tables of a layer group, [S, longest table]."""
        return self.block_tables if group == 0 else self.other_tables[group - 1]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The K samples of a step.

    L is the largest number of alternatives of a sample, W the largest number of named ids.
    """

    token_ids: Int32  # [K]
    logprobs: Float32  # [K] of the tokens, from the logits that ``LogprobsMode`` selects
    nonfinite: Bool  # [K] true if the logits were not finite; the token is then invalid
    ranks: Int32 | None  # [K] rank of the token, 1 = most likely; None: no sample needs logprobs
    top_token_ids: Int32 | None  # [K, L] best first
    top_logprobs: Float32 | None  # [K, L]
    scored: StepResult | None = None  # the P scored prompt tokens, in the fields of samples
    no_token_left: Bool | None = None  # [K] true if bans exclude every token; None: all False
    hidden_states: Float32 | None = None  # [E, H] after the final norm; None: not requested
    named_logprobs: Float32 | None = None  # [K, W] log-probabilities of named ids, -inf = padding
    images_encoded: int = 0  # images that the vision tower embedded
    encode_ms: float = 0.0  # time of the vision tower

    def lacks_token(self, at: int) -> bool:
        """Return true if bans and allowed ids excluded every token of sample ``at``."""
        return self.no_token_left is not None and bool(self.no_token_left[at])

    def only(self, kept: Bool | slice) -> StepResult:
        """Return the samples that a mask or slice selects, without scored tokens and hidden
        states."""
        ranks, top_ids, top_logprobs = self.ranks, self.top_token_ids, self.top_logprobs
        no_token_left, named = self.no_token_left, self.named_logprobs
        return StepResult(
            token_ids=self.token_ids[kept],
            logprobs=self.logprobs[kept],
            nonfinite=self.nonfinite[kept],
            ranks=None if ranks is None else ranks[kept],
            top_token_ids=None if top_ids is None else top_ids[kept],
            top_logprobs=None if top_logprobs is None else top_logprobs[kept],
            no_token_left=None if no_token_left is None else no_token_left[kept],
            named_logprobs=None if named is None else named[kept],
        )
