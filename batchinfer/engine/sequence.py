"""State of a request in the engine, and of its samples, the sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from batchinfer.engine.beam_search import BeamSearch
from batchinfer.engine.kv.prefix_index import Block, RecurrentState, token_key
from batchinfer.engine.prompt_logprobs import PromptScores
from batchinfer.engine.request import Request, RequestStats, SampleOutput, TokenIds, TokenLogprobs
from batchinfer.engine.step import Float32
from batchinfer.protocols import StopMatch

if TYPE_CHECKING:
    from batchinfer.protocols import GrammarState, StopChecker


class RequestState:
    """A request in the engine: unfinished and finished samples, and times."""

    __slots__ = (
        "admitted_at",
        "arrival",
        "arrived_at",
        "finished",
        "first_token_at",
        "hidden_state",
        "request",
        "samples",
        "scores",
        "search",
        "skip_prefix_cache",
        "stats",
    )

    def __init__(self, request: Request, arrived_at: float, arrival: int) -> None:
        self.request = request
        self.arrived_at = arrived_at
        self.arrival = arrival
        """Number of requests that arrived before it."""
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.skip_prefix_cache = False
        """Whether the row must not use cached blocks."""
        self.samples: list[Sequence] = []
        """Unfinished samples, or beams, best first."""
        self.finished: dict[int, SampleOutput] = {}
        self.search: BeamSearch | None = None
        self.hidden_state: Float32 | None = None
        """[H] of the last prompt token, if requested."""
        self.scores: PromptScores | None = None
        """Log-probabilities of the prompt's tokens, if requested."""
        # A row's prompt counts once, with its first sample.
        prompt_tokens = 0 if request.first_sample else request.num_prompt_tokens
        self.stats = RequestStats(prompt_tokens=prompt_tokens)

    def restart(self) -> Sequence:
        """Drop the row's samples and outputs; returns the sequence that starts over."""
        self.reset()
        leader = Sequence(self, self.request.first_sample)
        if self.request.first_sample:
            leader.computed_once = self.request.num_prompt_tokens
        self.samples = [leader]
        return leader

    def reset(self) -> None:
        """Drop the row's samples and outputs."""
        self.samples = []
        self.finished.clear()
        self.search = BeamSearch(self.request) if self.request.params.beam_width else None
        self.scores = self._prompt_scores()

    def _prompt_scores(self) -> PromptScores | None:
        request, num_top = self.request, self.request.params.prompt_logprobs
        if num_top is None:
            return None
        named = request.named_prompt_token_ids
        num_named = 0 if named is None else named.shape[1]
        first, last = request.logits_from, request.num_prompt_tokens - 1
        return PromptScores(num_top, first, last, num_named)

    def note_peak_blocks(self) -> None:
        """Update the peak of blocks; call it before the row releases some."""
        self.stats.peak_blocks = max(self.stats.peak_blocks, self._num_slots())

    def _num_slots(self) -> int:
        """Distinct slots that the sequences use."""
        first = self.samples[0] if self.samples else None
        if first is None or not first.blocks or not first.blocks[0].window_slots:
            return len({block for sequence in self.samples for block in sequence.blocks})
        own = first.blocks[0].slot >= 0
        if len(self.samples) == 1:
            count = len(first.blocks)
            return own * count + sum(count - gone for gone in first.num_evicted)
        slots = {block.slot for one in self.samples for block in one.blocks if own}
        for sequence in self.samples:
            for group, gone in enumerate(sequence.num_evicted):
                slots |= {block.window_slots[group].slot for block in sequence.blocks[gone:]}
        return len(slots)


class Sequence:
    """One sample of a row: the prompt's tokens, then its own.

    A running sequence has its counts in row ``row`` of the ``SequenceTable``; a waiting one holds
    no blocks and has no computed tokens.
    """

    __slots__ = (
        "blocks",
        "computed_once",
        "cumulative_logprob",
        "deferred",
        "grammar_state",
        "index",
        "index_parent",
        "logprobs",
        "num_evicted",
        "num_indexed",
        "output_ids",
        "recurrent_state",
        "released_blocks",
        "row",
        "state",
        "stop_checker",
    )

    def __init__(self, state: RequestState, index: int) -> None:
        request = state.request
        self.state = state
        self.index = index
        self.output_ids: list[int] = []
        self.blocks: list[Block] = []
        self.released_blocks: list[Block] = []
        """Blocks released when its last token was submitted but not yet read."""
        self.recurrent_state: RecurrentState | None = None
        """State after the computed tokens; None: it does not run, or the model has none."""
        self.num_evicted: tuple[int, ...] = ()
        """Leading blocks outside the window, for each window slot of a block."""
        self.row = -1
        self.deferred = False
        """Whether it already waited for a prefix hit of less than a block."""
        self.computed_once = 0
        """Leading tokens that were computed or found cached; computing them again is recompute."""
        self.index_parent: Block | None = None
        """Indexed parent of this sequence's next full block."""
        self.num_indexed = 0
        """Leading blocks whose tokens are in the index, as this sequence's block or another's."""
        self.cumulative_logprob = 0.0
        self.logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
        make_checker = request.make_stop_checker
        self.stop_checker: StopChecker | None = None if make_checker is None else make_checker()
        grammar = request.grammar
        self.grammar_state: GrammarState | None = None if grammar is None else grammar.begin()

    @property
    def request(self) -> Request:
        """The request that this is a sample of."""
        return self.state.request

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt's and its own."""
        return self.request.num_prompt_tokens + len(self.output_ids)

    @property
    def group(self) -> list[Sequence]:
        """The sequences that start and pause together with this one, itself included.

        The first one, the leader, represents the group in the queue.
        """
        return [self] if self.state.search is None else self.state.samples

    @property
    def awaits_group(self) -> bool:
        """Whether other sequences of its group do not run yet; they will fork from it or join."""
        return any(other is not self and other.row < 0 for other in self.group)

    def tokens(self, start: int, stop: int) -> TokenIds:
        """Token ids at positions ``start`` to ``stop``, int32."""
        prompt = self.request.prompt_token_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        own = np.asarray(
            self.output_ids[max(start - len(prompt), 0) : stop - len(prompt)], dtype=np.int32
        )
        return own if start >= len(prompt) else np.concatenate([prompt[start:], own])

    def key(self, start: int, stop: int) -> bytes:
        """Prefix-index key of the tokens at positions ``start`` to ``stop``."""
        return token_key(self.tokens(start, stop))

    def output(self, finish_reason: str, stop: int | str | StopMatch | None) -> SampleOutput:
        """The finished sample."""
        match = stop if isinstance(stop, StopMatch) else None
        return SampleOutput(
            index=self.index,
            token_ids=np.asarray(self.output_ids, dtype=np.int32),
            finish_reason=finish_reason,
            stop_reason=stop.stop if isinstance(stop, StopMatch) else stop,
            stop_match=match,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=self.logprobs,
        )
