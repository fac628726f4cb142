"""The running sequences' numbers, one row each, as numpy arrays.

A step touches every running sequence; with the numbers in arrays it does so without a Python
loop. Waiting sequences have no row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from batchinfer.engine.prefix_index import Block
from batchinfer.engine.sequence import Sequence

Int = npt.NDArray[np.integer]
Rows = npt.NDArray[np.intp]


class SequenceTable:
    """Rows of at most ``max_num_seqs`` running sequences.

    Args:
        max_num_seqs: rows.
        max_model_len: most tokens of a sequence; prompt + ``max_tokens`` is cut to it.
        block_size: tokens per block.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        rows = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.sequences: npt.NDArray[np.object_] = np.full(rows, None, dtype=object)
        """The ``Sequence`` in each row, or None."""
        self.active = np.zeros(rows, dtype=np.bool_)
        self.admission = np.zeros(rows, dtype=np.int64)
        """Order of admission; the newest is preempted first."""
        self.num_prompt = np.zeros(rows, dtype=np.int32)
        self.num_tokens = np.zeros(rows, dtype=np.int32)
        """Prompt and output tokens, one that is being drawn among them."""
        self.num_computed = np.zeros(rows, dtype=np.int32)
        """Leading tokens with KV in the pool once every submitted step ran."""
        self.computed_once = np.zeros(rows, dtype=np.int32)
        self.max_total = np.zeros(rows, dtype=np.int32)
        """Tokens at which the sequence ends by length."""
        self.length_known = np.zeros(rows, dtype=np.bool_)
        """Whether the sequence surely runs to ``max_total``."""
        self.last_token = np.zeros(rows, dtype=np.int32)
        self.sample_at = np.full(rows, -1, dtype=np.int32)
        """Which sample of the step in flight the last token is; -1 = ``last_token`` has it."""
        self.num_blocks = np.zeros(rows, dtype=np.int32)
        self.num_joined = np.zeros(rows, dtype=np.int32)
        """Leading blocks that somebody else refers to as well; not given back at the end."""
        self.unborn = np.zeros(rows, dtype=np.int32)
        """Further samples, or beams, that will fork from the row when it has caught up."""
        self.tail_shared = np.zeros(rows, dtype=np.bool_)
        """Whether the last block may be shared, so that writing to it must look."""
        self.block_table = np.zeros((rows, 16), dtype=np.int32)
        self.version = 0
        """Changes with every change of a block table but growth at its end."""
        self.temperature = np.zeros(rows, dtype=np.float32)
        self.top_p = np.zeros(rows, dtype=np.float32)
        self.top_k = np.zeros(rows, dtype=np.int32)
        self.min_p = np.zeros(rows, dtype=np.float32)
        self.seed = np.zeros(rows, dtype=np.uint64)
        self.stream = np.zeros(rows, dtype=np.uint64)
        self.sample_index = np.zeros(rows, dtype=np.int32)
        self.num_logprobs = np.zeros(rows, dtype=np.int32)
        self.min_tokens = np.zeros(rows, dtype=np.int32)
        self.stop_ids = np.full((rows, 4), -1, dtype=np.int32)
        self.checks_stops = np.zeros(rows, dtype=np.bool_)
        """Whether a stop checker sees each token."""
        self.edits_logits = np.zeros(rows, dtype=np.bool_)
        """Whether penalties, biases or bans need looking after, one sequence at a time."""
        self.needs_values = np.zeros(rows, dtype=np.bool_)
        """Whether drawing a token takes the values of all tokens before it."""
        self.is_beam = np.zeros(rows, dtype=np.bool_)
        """Whether the sequence is one of a row's beams."""
        self._free_rows = list(range(rows - 1, -1, -1))
        self._admissions = 0

    @property
    def num_running(self) -> int:
        """Sequences with a row."""
        return len(self.sequences) - len(self._free_rows)

    def has_room(self, count: int = 1) -> bool:
        """Whether so many more sequences can run; rows are kept for beams to be born."""
        return len(self._free_rows) - int(self.unborn[self.is_beam].sum()) >= count

    def rows(self) -> Rows:
        """Rows in use, oldest admission first."""
        rows = np.flatnonzero(self.active)
        return rows[np.argsort(self.admission[rows], kind="stable")]

    def running(self) -> Iterator[Sequence]:
        """The running sequences, oldest admission first."""
        return (self.sequence(row) for row in self.rows())

    def sequence(self, row: int | np.intp) -> Sequence:
        """The sequence in a row that is in use."""
        sequence = self.sequences[row]
        assert isinstance(sequence, Sequence)
        return sequence

    def total_limit(self, sequence: Sequence) -> int:
        """Tokens at which the sequence ends by length."""
        request = sequence.request
        return min(request.num_prompt_tokens + request.params.max_tokens, self.max_model_len)

    def add(self, sequence: Sequence, blocks: list[Block], num_computed: int, joined: int) -> int:
        """Give a sequence a row; ``blocks`` hold its first ``num_computed`` tokens."""
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
        self.last_token[row] = sequence.tokens(sequence.num_tokens - 1, sequence.num_tokens)[0]
        self.sample_at[row] = -1
        self.num_joined[row] = joined
        self.unborn[row] = sequence.num_unborn
        self.tail_shared[row] = False
        sequence.blocks = []
        self.num_blocks[row] = 0
        if joined:
            self._note_joined(blocks[joined - 1], joined)
        for block in blocks:
            self.append_block(row, block)
        self._set_sampling(row, sequence)
        return row

    def remove(self, sequence: Sequence) -> list[Block]:
        """Take a sequence's row back; returns its blocks, which the caller releases."""
        row, blocks = sequence.row, sequence.blocks
        sequence.computed_once = int(self.computed_once[row])
        self.block_table[row, : len(blocks)] = 0
        self.version += 1
        self.active[row] = False
        self.unborn[row] = 0
        self.sequences[row] = None
        self._free_rows.append(row)
        sequence.row, sequence.blocks = -1, []
        return blocks

    def append_block(self, row: int, block: Block) -> None:
        """Add a block at the end of a row's table."""
        blocks = self.sequence(row).blocks
        if len(blocks) == self.block_table.shape[1]:
            wider = np.zeros((len(self.sequences), 2 * len(blocks)), dtype=np.int32)
            wider[:, : len(blocks)] = self.block_table
            self.block_table = wider
        self.block_table[row, len(blocks)] = block.slot
        if block.row < 0:
            block.row = row
        blocks.append(block)
        self.num_blocks[row] = len(blocks)

    def _note_joined(self, block: Block, count: int) -> None:
        """The first ``count`` blocks of the sequence that ``block`` was made for are now shared."""
        maker = self.sequences[block.row]
        if maker is not None and count <= len(maker.blocks) and maker.blocks[count - 1] is block:
            self.num_joined[block.row] = max(self.num_joined[block.row], count)

    def replace_last_block(self, row: int, block: Block) -> Block:
        """Put ``block`` in the place of a row's last one; returns that one."""
        blocks = self.sequence(row).blocks
        replaced, blocks[-1] = blocks[-1], block
        self.version += 1
        self.block_table[row, len(blocks) - 1] = block.slot
        return replaced

    def _set_sampling(self, row: int, sequence: Sequence) -> None:
        request, params = sequence.request, sequence.request.params
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = max(params.top_k, 0)
        self.min_p[row] = params.min_p
        self.seed[row], self.stream[row] = request.rng_key
        self.sample_index[row] = sequence.index
        self.num_logprobs[row] = request.num_candidates
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
        self.is_beam[row] = params.beam_width is not None
        self.needs_values[row] = bool(
            params.beam_width
            or params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1.0
            or request.bad_words_token_ids
        )
        self.edits_logits[row] = bool(
            (self.needs_values[row] and not params.beam_width)
            or params.logit_bias
            or params.allowed_token_ids is not None
            or (params.min_tokens > 0 and stop_ids)
        )

    def check_invariants(self) -> None:
        """Assert that arrays, sequences and block tables agree."""
        assert self.num_running == int(self.active.sum())
        for row, sequence in enumerate(self.sequences):
            assert (sequence is not None) == bool(self.active[row])
            if sequence is None:
                continue
            assert sequence.row == row
            in_flight = bool(self.sample_at[row] >= 0)
            assert self.num_tokens[row] == sequence.num_tokens + in_flight
            assert not in_flight or self.num_computed[row] == sequence.num_tokens
            assert self.num_blocks[row] == len(sequence.blocks)
            slots = [block.slot for block in sequence.blocks]
            assert self.block_table[row, : len(slots)].tolist() == slots
            assert not self.block_table[row, len(slots) :].any()
            assert 0 <= self.num_computed[row] < self.num_tokens[row] <= self.max_total[row]
            assert len(slots) == -(-int(self.num_computed[row]) // self.block_size)
