"""State of a request and of its samples (sequences) in the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from batchinfer.engine.beam_search import BeamSearch
from batchinfer.engine.kv.prefix_index import (
    Block,
    RecurrentState,
    StateSnapshot,
    common_tokens,
    token_key,
)
from batchinfer.engine.prompt_logprobs import PromptScores
from batchinfer.engine.request import Request, RequestStats, SampleOutput, TokenIds, TokenLogprobs
from batchinfer.engine.step import Float32
from batchinfer.protocols import StopMatch

if TYPE_CHECKING:
    from batchinfer.protocols import GrammarState, StopChecker


_OUTPUT = np.int32(1 << 30)  # larger than any token id


class RequestState:
    """State of one request: unfinished and finished samples, statistics, and times."""

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
        """Number of requests that arrived before this request."""
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.skip_prefix_cache = False
        """True if the row must not use cached blocks."""
        self.samples: list[Sequence] = []
        """Unfinished samples; for a beam search the beams, best first."""
        self.finished: dict[int, SampleOutput] = {}
        self.search: BeamSearch | None = None
        self.hidden_state: Float32 | None = None
        """[H] hidden state of the last prompt token, if requested."""
        self.scores: PromptScores | None = None
        """Log-probabilities of the prompt's tokens, if requested."""
        # Only the request with the first sample counts the row's prompt.
        prompt_tokens = 0 if request.first_sample else request.num_prompt_tokens
        self.stats = RequestStats(prompt_tokens=prompt_tokens)

    def restart(self) -> Sequence:
        """Drop all samples and outputs; return the sequence that starts from the prompt."""
        self.reset()
        leader = Sequence(self, self.request.first_sample)
        if self.request.first_sample:
            leader.computed_once = self.request.num_prompt_tokens
        self.samples = [leader]
        return leader

    def reset(self) -> None:
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
        """Update the peak number of blocks. Call it before the request releases blocks."""
        self.stats.peak_blocks = max(self.stats.peak_blocks, self._num_slots())

    def _num_slots(self) -> int:
        first = self.samples[0] if self.samples else None
        if first is None or not first.blocks or not first.blocks[0].window_slots:
            blocks = {block for sequence in self.samples for block in sequence.blocks}
            return sum(block.slot >= 0 for block in blocks)  # none without attention
        has_full = first.blocks[0].slot >= 0
        if len(self.samples) == 1:
            count = len(first.blocks)
            return has_full * count + sum(count - evicted for evicted in first.num_evicted)
        slots = {block.slot for sample in self.samples for block in sample.blocks if has_full}
        for sequence in self.samples:
            for group, evicted in enumerate(sequence.num_evicted):
                slots |= {block.window_slots[group].slot for block in sequence.blocks[evicted:]}
        return len(slots)


class Sequence:
    """One sample of a row: the prompt's tokens, followed by output tokens.

    The token and block counts of a running sequence are in row ``row`` of the ``SequenceTable``. A
    waiting sequence has no blocks and no computed tokens.
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
        "saved_state",
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
        """Blocks that were released before the last token was read."""
        self.recurrent_state: RecurrentState | None = None
        """State after the computed tokens; None if the sequence waits or the model has no state."""
        self.num_evicted: tuple[int, ...] = ()
        """Number of leading blocks that have left the sliding window, for each layer group in
        ``WindowSlots.windows``."""
        self.row = -1
        self.deferred = False
        """True if the sequence has already waited for a prefix hit that is less than a block
        longer."""
        self.computed_once = 0
        """Number of leading tokens that were computed or cached before. Computing these tokens
        again counts as recomputation."""
        self.saved_state: StateSnapshot | None = None
        """Snapshot that was taken for this waiting sequence."""
        self.index_parent: Block | None = None
        """Indexed block that will be the parent of this sequence's next full block."""
        self.num_indexed = 0
        """Number of leading blocks that are indexed, or for which an equal block is indexed."""
        self.cumulative_logprob = 0.0
        self.logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
        make_checker = request.make_stop_checker
        self.stop_checker: StopChecker | None = None if make_checker is None else make_checker()
        grammar = request.grammar
        self.grammar_state: GrammarState | None = None if grammar is None else grammar.begin()

    @property
    def request(self) -> Request:
        return self.state.request

    @property
    def num_tokens(self) -> int:
        """Number of known tokens, prompt and output together."""
        return self.request.num_prompt_tokens + len(self.output_ids)

    @property
    def group(self) -> list[Sequence]:
        """The sequences that start and pause together: all beams, or only this sequence.

        The first sequence, the leader, represents the group in the queue.
        """
        return [self] if self.state.search is None else self.state.samples

    @property
    def awaits_group(self) -> bool:
        """True if other sequences of the group wait for ``BeamGroups.join`` to start them."""
        return any(other is not self and other.row < 0 for other in self.group)

    def first_fork(self) -> int:
        """Return the number of leading tokens that all sequences of a waiting group share."""
        stop = self.num_tokens - self.awaits_group
        key = self.key(0, stop)
        return min(common_tokens(key, other.key(0, stop)) for other in self.group)

    def tokens(self, start: int, stop: int) -> TokenIds:
        """Return the token ids (int32) from position ``start`` up to, but not including,
        ``stop``."""
        prompt = self.request.prompt_token_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        output = np.asarray(
            self.output_ids[max(start - len(prompt), 0) : stop - len(prompt)], dtype=np.int32
        )
        return output if start >= len(prompt) else np.concatenate([prompt[start:], output])

    def key(self, start: int, stop: int) -> bytes:
        """Return the prefix-index key of ``tokens(start, stop)``.

        In the key, output tokens have different ids than prompt tokens, because their KV may differ
        (``KVLayout.prompt_windows``).
        """
        token_ids, prompt = self.tokens(start, stop), self.request.num_prompt_tokens
        if stop > prompt:
            token_ids[max(prompt - start, 0) :] |= _OUTPUT  # not the request's own array
        return token_key(token_ids)

    def output(self, finish_reason: str, stop: int | str | StopMatch | None) -> SampleOutput:
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
