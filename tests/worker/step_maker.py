"""Builds steps by hand, for sequences with scattered blocks and any number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from batchinfer.engine.step import SamplingBatch, SamplingColumns, Step


@dataclass
class HandSequence:
    """A sequence with its block table; tests advance it by hand."""

    token_ids: list[int]
    block_table: list[int]
    num_computed: int = 0
    state_slots: list[int] = field(default_factory=list)


@dataclass
class StepMaker:
    """Assigns blocks in a shuffled order, and builds steps of greedy samples."""

    num_blocks: int
    block_size: int
    seed: int = 0
    slots_per_state: int = 0
    attends: bool = True
    """False for a model without attention, whose blocks have no slots."""
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        order = np.random.default_rng(self.seed).permutation(self.num_blocks)
        self.free = [int(block) for block in order]

    def sequence(self, token_ids: list[int]) -> HandSequence:
        """Return a new sequence without computed tokens."""
        state_slots = [self.free.pop() for _ in range(self.slots_per_state)]
        return HandSequence(list(token_ids), [], state_slots=state_slots)

    def step(
        self,
        parts: list[tuple[HandSequence, int]],
        *,
        copies: tuple[tuple[int, int], ...] = (),
        every_logit: bool = False,
    ) -> Step:
        """Return a step that computes the next tokens of each sequence.

        Logits are computed for the last token of each sequence, or with ``every_logit`` for all
        tokens.
        """
        tokens, positions, starts, slots, wanted = [], [], [0], [], []
        for sequence, count in parts:
            first = sequence.num_computed
            sequence.num_computed += count
            while len(sequence.block_table) * self.block_size < sequence.num_computed:
                sequence.block_table.append(self.free.pop())
            for position in range(first, sequence.num_computed):
                tokens.append(sequence.token_ids[position])
                positions.append(position)
                block = sequence.block_table[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
                if every_logit or position == len(sequence.token_ids) - 1:
                    wanted.append(len(tokens) - 1)
            starts.append(len(tokens))
        longest = max(len(sequence.block_table) for sequence, _ in parts)
        tables = np.zeros((len(parts), longest), np.int32)
        for row, (sequence, _) in enumerate(parts):
            tables[row, : len(sequence.block_table)] = sequence.block_table
        if not self.attends:
            tables, slots = tables[:, :0], [-1] * len(slots)
        return Step(
            token_ids=np.array(tokens, np.int32),
            previous_sample=np.full(len(tokens), -1, np.int32),
            positions=np.array(positions, np.int32),
            query_starts=np.array(starts, np.int32),
            context_lens=np.array([s.num_computed for s, _ in parts], np.int32),
            block_tables=tables,
            state_tables=np.array([s.state_slots for s, _ in parts], np.int32),
            slot_mapping=np.array(slots, np.int64),
            block_copies=np.array(copies, np.int32).reshape(-1, 2),
            logits_indices=np.array(wanted, np.int32),
            sampling=greedy_batch(len(wanted)),
        )


def greedy_batch(num_samples: int) -> SamplingBatch:
    """Return a batch with one greedy sample from each row of logits."""
    columns = SamplingColumns.zeros(num_samples)
    columns.top_p[:], columns.num_logprobs[:] = 1, -1
    none = np.empty(0, np.int32)
    return SamplingBatch(
        **columns.take(np.arange(num_samples)),
        logits_rows=np.arange(num_samples, dtype=np.int32),
        position=np.zeros(num_samples, np.int32),
        penalties=None,
        bias_samples=none,
        bias_token_ids=none,
        bias_values=np.empty(0, np.float32),
        allowed_samples=none,
        allowed_token_ids=none,
    )
