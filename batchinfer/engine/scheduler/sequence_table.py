"""The table of running sequences, stored as numpy columns.

Every step reads and updates all running sequences, and columns avoid a Python loop over them.
Waiting sequences have no row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from batchinfer.engine.images import rotary_shift
from batchinfer.engine.kv.layer_groups import num_outside_windows
from batchinfer.engine.kv.prefix_index import Block, RecurrentState
from batchinfer.engine.request import LARGEST_GROUP, Request
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.step import LogprobsMode, SamplingColumns

Int = npt.NDArray[np.integer]
Rows = npt.NDArray[np.intp]


NO_BRANCH = int(np.iinfo(np.int32).max)
"""Value of ``next_branch`` if no branch point is left: a position beyond the end of every
sequence."""


class SequenceTable:
    """Rows of running sequences.

    Args:
        max_num_seqs: maximum number of running sequences. A beam search with more beams runs alone.
        max_model_len: maximum number of tokens of a sequence, prompt and output together.
        windows: window of each layer group; 0 = full attention, which comes first.
            Empty if no layer attends.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        windows: tuple[int, ...] = (0,),
        slots_per_state: int = 0,
    ) -> None:
        rows = max(max_num_seqs, LARGEST_GROUP)
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.windows = windows
        self._has_windows = any(windows)
        self._none_evicted = np.zeros((len(windows), 1), dtype=np.int32)
        self.sequences: npt.NDArray[np.object_] = np.full(rows, None, dtype=object)
        """The ``Sequence`` in each row, or None."""
        self.active = np.zeros(rows, dtype=np.bool_)
        self.admission = np.zeros(rows, dtype=np.int64)
        """Consecutive number, assigned at admission. The row with the highest number is preempted
        first."""
        self.num_prompt = np.zeros(rows, dtype=np.int32)
        self.num_tokens = np.zeros(rows, dtype=np.int32)
        """Number of prompt and output tokens, including a token that is being drawn."""
        self.num_computed = np.zeros(rows, dtype=np.int32)
        """Number of leading tokens with KV in the pool after all submitted steps."""
        self.computed_once = np.zeros(rows, dtype=np.int32)
        self.max_total = np.zeros(rows, dtype=np.int32)
        """Number of tokens at which the sequence reaches its length limit."""
        self.length_known = np.zeros(rows, dtype=np.bool_)
        """True if the sequence certainly runs to ``max_total``."""
        self.last_token = np.zeros(rows, dtype=np.int32)
        self.sample_at = np.full(rows, -1, dtype=np.int32)
        """Index of the sample in the step in flight that draws the last token; -1: the token is in
        ``last_token``."""
        self.num_blocks = np.zeros(rows, dtype=np.int32)
        self.num_shared_blocks = np.zeros(rows, dtype=np.int32)
        """Number of leading blocks that other sequences share."""
        self.pending_forks = np.zeros(rows, dtype=np.int32)
        """Number of samples or beams that will fork once the row's known tokens are computed."""
        self.tail_shared = np.zeros(rows, dtype=np.bool_)
        """True if the last block may be shared. Check the reference count before a write."""
        self.block_table = np.zeros((rows, 16), dtype=np.int32)
        """[rows, longest] slots in the first layer group; undefined outside the window, and without
        a layer group."""
        self.other_tables = np.zeros((max(len(windows) - 1, 0), rows, 16), dtype=np.int32)
        """[G - 1, rows, longest] slots in the other layer groups."""
        self._serials = np.zeros((rows if any(windows[:1]) else 0, 16), dtype=np.int64)
        """[rows, longest] serial numbers of blocks, if every layer group has a window."""
        self.state_table = np.zeros((rows, slots_per_state), dtype=np.int32)
        """[rows, slots of a state] slots of recurrent states."""
        self.state_shared = np.zeros(rows, dtype=np.bool_)
        """True if the recurrent state may be shared. Check the reference count before a write."""
        self.next_branch = np.full(rows, NO_BRANCH, dtype=np.int32)
        """Next branch point of the prompt, or fork of waiting beams, where a step must end;
        ``NO_BRANCH`` after the last."""
        self.num_branches = np.zeros(rows, dtype=np.int32)
        """Number of branch points that the row has not reached yet."""
        self.version = 0
        """Incremented by every change to a block table except growth at its end."""
        self.sampling = SamplingColumns.zeros(rows)
        self.min_tokens = np.zeros(rows, dtype=np.int32)
        self.stop_ids = np.full((rows, 4), -1, dtype=np.int32)
        self.checks_stops = np.zeros(rows, dtype=np.bool_)
        """True if a stop checker sees each token."""
        self.edits_logits = np.zeros(rows, dtype=np.bool_)
        """True if penalties, biases or bans need work per sequence."""
        self.needs_values = np.zeros(rows, dtype=np.bool_)
        """True if drawing a token needs the values of all earlier tokens."""
        self.awaits_first_token = np.zeros(rows, dtype=np.bool_)
        """True if the request has not drawn any token yet."""
        self.scores_prompt = np.zeros(rows, dtype=np.bool_)
        """True if the prompt's log-probabilities are requested."""
        self.pools = np.zeros(rows, dtype=np.bool_)
        """True if the hidden state of the last prompt token is requested."""
        self.given_token = np.full(rows, -1, dtype=np.int32)
        """The fixed output token; -1: the token is drawn."""
        self.adapter = np.zeros(rows, dtype=np.int32)
        """Number of the adapter; 0 = the base model."""
        self.has_grids = np.zeros(rows, dtype=np.bool_)
        """True for a prompt with images that have grids of rotary positions."""
        self.has_whole_images = np.zeros(rows, dtype=np.bool_)
        """True for a prompt with images that a chunk must not cut."""
        self.rotary_shift = np.zeros(rows, dtype=np.int32)
        """Rotary position of a token after the prompt, minus its index."""
        self.has_grammar = np.zeros(rows, dtype=np.bool_)
        self.has_processors = np.zeros(rows, dtype=np.bool_)
        """True if the user's logits processors change the logits."""
        self.names_tokens = np.zeros(rows, dtype=np.bool_)
        """True if log-probabilities of named tokens are requested."""
        self.logprobs_mode = np.zeros(rows, dtype=np.int32)
        self.is_beam = np.zeros(rows, dtype=np.bool_)
        self._free_rows = list(range(rows - 1, -1, -1))
        self._admissions = 0

    @property
    def block_ids(self) -> npt.NDArray[np.integer]:
        """Ids of each row's blocks, [rows, columns]. Two entries are equal only if the rows share
        the block. Entries after a row's ``num_blocks`` have no meaning."""
        return self._serials if any(self.windows[:1]) else self.block_table

    @property
    def num_running(self) -> int:
        return len(self.sequences) - len(self._free_rows)

    def has_room(self, count: int = 1) -> bool:
        """Return true if ``count`` more sequences can run.

        Rows stay reserved for beams that will fork. If no sequence runs, any beam search fits.
        """
        if self.num_running == 0:
            return count <= len(self.sequences)
        taken = self.num_running + int(self.pending_forks[self.is_beam].sum())
        return taken + count <= self.max_num_seqs

    def rows(self) -> Rows:
        """Return the rows in use, oldest admission first."""
        rows = np.flatnonzero(self.active)
        return rows[np.argsort(self.admission[rows], kind="stable")]

    def running(self) -> Iterator[Sequence]:
        return (self.sequence(row) for row in self.rows())

    def sequence(self, row: int | np.intp) -> Sequence:
        sequence = self.sequences[row]
        assert isinstance(sequence, Sequence)
        return sequence

    def num_evicted(self, num_tokens: Int) -> npt.NDArray[np.integer]:
        """Return the number of leading blocks outside each layer group's window, broadcastable to
        [G, S].

        Args:
            num_tokens: [S] computed tokens of each sequence.
        """
        if not self._has_windows:
            return self._none_evicted
        return np.stack([num_outside_windows(num_tokens, w, self.block_size) for w in self.windows])

    def total_limit(self, sequence: Sequence) -> int:
        """Return the number of tokens at which the sequence reaches its length limit."""
        request = sequence.request
        total = request.num_prompt_tokens + request.params.max_tokens
        return min(total, self.most_tokens(request))

    def most_tokens(self, request: Request) -> int:
        """Return the maximum number of tokens of a request, prompt and output together.

        The token that a pooling request draws is never computed, so it needs no position.
        """
        return self.max_model_len + request.pools

    def add(
        self, sequence: Sequence, blocks: list[Block], num_computed: int, num_shared: int
    ) -> None:
        """Give a sequence a row, with ``blocks`` that hold its first ``num_computed`` tokens.

        The first ``num_shared`` of the blocks are used by other running sequences.
        """
        row = self._free_rows.pop()
        sequence.row = row
        self.version += 1
        self.sequences[row] = sequence
        self.active[row] = True
        self.admission[row] = self._admissions
        self._admissions += 1
        self.num_prompt[row] = sequence.request.num_prompt_tokens
        self.num_tokens[row] = sequence.num_tokens
        self.num_computed[row] = num_computed
        self.computed_once[row] = max(sequence.computed_once, num_computed)
        self.max_total[row] = self.total_limit(sequence)
        self.awaits_first_token[row] = sequence.state.first_token_at is None
        self.last_token[row] = sequence.tokens(sequence.num_tokens - 1, sequence.num_tokens)[0]
        self.sample_at[row] = -1
        self.num_shared_blocks[row] = num_shared
        self.pending_forks[row] = 0
        self.tail_shared[row] = False
        sequence.blocks = []
        self.num_blocks[row] = 0
        if num_shared:
            self._note_shared(blocks[num_shared - 1], num_shared)
        for block in blocks:
            self.append_block(row, block)
        self._set_sampling(row, sequence)

    def find_next_branch(self, row: int | np.intp) -> None:
        """Set a row's next branch point or fork after its computed tokens."""
        sequence, computed = self.sequence(row), int(self.num_computed[row])
        self.next_branch[row] = next_stop(sequence, computed)
        self.num_branches[row] = len(branches_after(sequence, computed))

    def set_state(self, sequence: Sequence, state: RecurrentState, *, is_shared: bool) -> None:
        """Give a running sequence the recurrent state that follows its computed tokens."""
        sequence.recurrent_state = state
        self.find_next_branch(sequence.row)
        self.state_table[sequence.row] = state.slots
        self.state_shared[sequence.row] = is_shared

    def remove(self, sequence: Sequence) -> list[Block]:
        """Free a sequence's row; return its blocks, which the caller must release."""
        row, blocks = sequence.row, sequence.blocks
        sequence.computed_once = int(self.computed_once[row])
        self.block_table[row, : len(blocks)] = 0
        if self._has_windows:
            self.other_tables[:, row, : len(blocks)] = 0
        self.version += 1
        self.active[row] = False
        self.next_branch[row], self.num_branches[row] = NO_BRANCH, 0
        self.pending_forks[row] = 0
        self.sequences[row] = None
        self._free_rows.append(row)
        sequence.row, sequence.blocks = -1, []
        return blocks

    def append_block(self, row: int, block: Block) -> None:
        blocks = self.sequence(row).blocks
        if len(blocks) == self.block_table.shape[1]:
            more = ((0, 0), (0, len(blocks)))
            self.block_table = np.pad(self.block_table, more)
            self.other_tables = np.pad(self.other_tables, ((0, 0), *more))
            self._serials = np.pad(self._serials, more)
        self._set_slots(row, len(blocks), block)
        if block.row < 0:
            block.row = row
        blocks.append(block)
        self.num_blocks[row] = len(blocks)

    def _note_shared(self, block: Block, count: int) -> None:
        """Count the first ``count`` blocks as shared in the row for which ``block`` was
        allocated."""
        maker = self.sequences[block.row]
        if maker is not None and count <= len(maker.blocks) and maker.blocks[count - 1] is block:
            self.num_shared_blocks[block.row] = max(self.num_shared_blocks[block.row], count)

    def replace_last_block(self, row: int, block: Block) -> Block:
        """Replace a row's last block with ``block``; return the old block."""
        blocks = self.sequence(row).blocks
        replaced, blocks[-1] = blocks[-1], block
        self.version += 1
        self._set_slots(row, len(blocks) - 1, block)
        return replaced

    def _set_slots(self, row: int, at: int, block: Block) -> None:
        if not block.window_slots:
            self.block_table[row, at] = block.slot
            return
        slots = [max(window_slot.slot, 0) for window_slot in block.window_slots]
        first, *rest = slots if self.windows[0] else [block.slot, *slots]
        self.block_table[row, at], self.other_tables[:, row, at] = first, rest
        if len(self._serials):
            self._serials[row, at] = block.serial

    def _set_sampling(self, row: int, sequence: Sequence) -> None:
        request, params = sequence.request, sequence.request.params
        self.adapter[row] = request.adapter
        self.has_grids[row] = any(each.image.grid for each in request.images)
        self.has_whole_images[row] = any(each.image.attends_both_ways for each in request.images)
        self.rotary_shift[row] = rotary_shift(request.images)
        seed, stream = request.rng_key
        self.sampling.set_row(
            row,
            params,
            top_k=max(params.top_k, 0),
            seed=seed,
            stream=stream,
            sample_index=sequence.index,
            num_logprobs=request.num_candidates,
        )
        self.min_tokens[row] = params.min_tokens
        stop_ids = request.stop_token_ids
        if len(stop_ids) > self.stop_ids.shape[1]:
            wider = np.full((len(self.sequences), len(stop_ids)), -1, dtype=np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stop_ids)] = stop_ids
        self.checks_stops[row] = sequence.stop_checker is not None
        self.length_known[row] = not stop_ids and request.make_stop_checker is None
        self.scores_prompt[row] = params.prompt_logprobs is not None
        self.pools[row] = request.pools
        self.given_token[row] = -1 if request.given_token is None else request.given_token
        self.has_grammar[row] = request.grammar is not None
        self.has_processors[row] = bool(request.logits_processors)
        self.names_tokens[row] = bool(request.named_token_ids)
        is_beam = params.beam_width is not None
        self.logprobs_mode[row] = LogprobsMode.EDITED if is_beam else request.logprobs_mode
        self.is_beam[row] = is_beam
        looks_back = (
            params.has_penalties
            or params.no_repeat_ngram_size > 0
            or bool(request.bad_words_token_ids)
        )
        needs_values = looks_back or is_beam or self.has_grammar[row]
        self.needs_values[row] = needs_values or self.has_processors[row]
        self.edits_logits[row] = bool(
            looks_back
            or params.logit_bias
            or params.allowed_token_ids is not None
            or (params.min_tokens > 0 and stop_ids)
        )


def branches_after(sequence: Sequence, num_computed: int) -> list[int]:
    """Return the branch points of a sequence's prompt after its computed tokens.

    Branch points after the first token whose logits are needed are skipped: later rows with these
    tokens need the logits too, so they compute these tokens themselves.
    """
    request = sequence.request
    return [at for at, _ in request.branch_points if num_computed < at <= request.logits_from]


def next_stop(sequence: Sequence, num_computed: int) -> int:
    """Return the first position after a sequence's computed tokens where its recurrent state is
    needed: a branch point of its prompt, or the position where the first waiting beam forks."""
    stops = branches_after(sequence, num_computed)
    if num_computed < sequence.num_tokens - 1 and sequence.awaits_group:
        stops.append(sequence.first_fork())
    return min((at for at in stops if at > num_computed), default=NO_BRANCH)
