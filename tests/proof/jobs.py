"""The job of each cell: one model, and one of four schedules."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.job.spec.spec import JobSpec
from tests.job.images.pictures import HUB_IMAGE, png
from tests.proof.checkpoints import CHECKPOINTS

NUM_ROWS = 24
_IMAGES_OF_ROWS = ([0], [1, 2], [], [0], [3, 1], [2])
_BEGINNINGS = ("Say in one word", "Say in a few words, like a pirate would", "Say")
SMALL_POOLS = (6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of KV blocks to try, in this order, for a pool in which rows displace each other."""


@dataclass(frozen=True)
class Schedule:
    """How the rows of a job run."""

    means: str
    engine: dict[str, Any]
    n: int = 1
    num_workers: int = 1
    small_pool: bool = False
    """True to use the smallest pool that holds each row."""


SCHEDULES = {
    "input-order": Schedule("rows in input order, one process", {"order": "input"}),
    "small-pool": Schedule(
        "rows in prefix order, in the smallest pool that holds each row: rows are preempted",
        {"order": "prefix"},
        small_pool=True,
    ),
    "chunks-of-7": Schedule(
        "at most 7 tokens a step, four samples of each prompt", {"max_num_batched_tokens": 7}, n=4
    ),
    "two-workers": Schedule("two workers that claim parts", {"order": "input"}, num_workers=2),
}


def make_inputs(model: str, folder: Path) -> None:
    """Write the model's checkpoint and its rows to ``folder``, unless they exist."""
    if (folder / "rows.parquet").exists():
        return
    program = [sys.executable, "-m", "tests.proof.checkpoints", model, str(folder / "model")]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    texts = [f"{_BEGINNINGS[row % 3]} what {row * 37 % 101} is" for row in range(NUM_ROWS)]
    columns: dict[str, Any] = {"text": texts}
    if CHECKPOINTS[model].sees:
        numbers = [_IMAGES_OF_ROWS[row % len(_IMAGES_OF_ROWS)] for row in range(NUM_ROWS)]
        cells = [[{"bytes": png(number), "path": None} for number in row] for row in numbers]
        columns["image"] = pa.array(cells, pa.list_(HUB_IMAGE))
    pq.write_table(pa.table(columns), folder / "rows.parquet")


def make_job(model: str, schedule: Schedule, inputs: Path, out: str, num_blocks: int) -> JobSpec:
    """Return the job; ``num_blocks`` is the size of a small pool, and ignored for a large one."""
    sees = CHECKPOINTS[model].sees
    prompt = {"column": "text", **({"images": "image"} if sees else {"chat_template": "none"})}
    engine = {"max_num_seqs": 8, "num_kv_blocks": 512, **schedule.engine}
    if schedule.small_pool:
        engine["num_kv_blocks"] = num_blocks
    return JobSpec.model_validate(
        {
            "model": {"name": str(inputs / "model"), "dtype": "float32"},
            "input": {"path": str(inputs / "rows.parquet")},
            "prompt": prompt,
            "sampling": {
                **{"max_tokens": 12, "temperature": 1.0, "seed": 5},
                **{"n": schedule.n, "ignore_eos": True},
            },
            "engine": engine,
            "output": {"path": out, "include": ["token_ids"], "rows_per_part": 6},
        }
    )
