"""Rows with three levels of common prefixes, and engines that run rows without a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa

from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.runner import Ready
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.step import Step, StepResult
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuilt

LEVELS = (203, 101, 53)
"""Number of tokens that each level adds; not multiples of a block."""
BLOCK_SIZE = 16
FANOUT = 8
OUTPUT_TOKENS = 16
MAX_MODEL_LEN = 2048
VOCAB = 250


class Drawing:
    """A runner without a model; it draws tokens by row, sample and position."""

    def submit(self, step: Step) -> Ready:
        batch = step.sampling
        drawn = batch.stream + batch.sample_index.astype(np.uint64) * 7 + batch.position
        return Ready(
            StepResult(
                token_ids=(1 + drawn % VOCAB).astype(np.int32),
                logprobs=np.zeros(step.num_samples, dtype=np.float32),
                nonfinite=np.zeros(step.num_samples, dtype=np.bool_),
                ranks=None,
                top_token_ids=None,
                top_logprobs=None,
            )
        )


class DrawingBuild:
    """Builds engines with the runner ``Drawing``."""

    def __init__(self, num_blocks: int, max_num_seqs: int = 1024) -> None:
        self._num_blocks = num_blocks
        self._max_num_seqs = max_num_seqs

    def __call__(
        self, model: object, engine: object, *, log: Callable[[str], None], **_: object
    ) -> FakeBuilt:
        pool = BlockPool(self._num_blocks, BLOCK_SIZE, enable_prefix_caching=True)
        table = SequenceTable(self._max_num_seqs, MAX_MODEL_LEN, BLOCK_SIZE)
        return FakeBuilt(
            Engine(Scheduler(pool, table, 8192), Drawing()),
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            num_blocks=self._num_blocks,
        )


def write_shared_rows(path: Path, num_rows: int) -> int:
    """Write token ids of rows in random order; return the number of their distinct prefixes."""
    random_ = random.Random(0)
    groups = list(product(range(FANOUT), repeat=len(LEVELS)))
    rows, prefixes, tails = [], set(), set()
    for at in range(num_rows):
        group, ids = groups[at % len(groups)], []
        for level, length in enumerate(LEVELS, start=1):
            ids += _piece(group[:level], length)
            prefixes.add((length, group[:level]))
        own = tuple(random_.randrange(1, VOCAB) for _ in range(random_.randrange(20, 55)))
        tails.update((group, own[:length]) for length in range(1, len(own) + 1))
        rows.append([*ids, *own])
    random_.shuffle(rows)
    write_parquet(path, {"ids": pa.array(rows, pa.list_(pa.int32()))})
    return sum(length for length, _ in prefixes) + len(tails)


@cache
def _piece(group: tuple[int, ...], length: int) -> list[int]:
    """Return tokens; the first one differs from that of the group's siblings."""
    random_ = random.Random(str(group))
    return [1 + group[-1], *(random_.randrange(1, VOCAB) for _ in range(length - 1))]
