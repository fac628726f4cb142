"""A job of many short rows through everything but a model: memory, resume, cost of commits.

    python benchmarks/million_rows.py [--rows 1000000] [--folder DIR] [--slack 1]

Reading, prompts, tokens, scheduling, texts, segments, parts and records are the real ones; the
engine's runner draws one token at once. The job is killed at nine tenths (kill -9), then run to
its end.
Prints, and exits 1 where one is missed:

- memory: growth of the process's resident memory by rows finished, over the last three quarters of
  the first run, least squares; under 1 MB per 100,000 rows;
- resume: from the call that runs the job to its first step; under 10 s;
- commits: seconds spent writing segments, parts and records, as a share of the time that the job's
  tokens (prompts and outputs) take at 20,000 tokens/s; under 1 %.

The allocators' heaps take some half a million rows to settle: until then their free space grows by
2 MB per 100,000 rows, while what is in use (Python's objects, malloc, Arrow) stays as it is to
0.2 MB. So kill late. Small jobs (below a quarter of a million rows) end before that: they print the
numbers and are held to the last two only. What is measured in seconds may be ``--slack`` times as
much: on a machine that does other things too it says little.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from host import EOS, StubRunner
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.job.output import part_writer
from batchinfer.job.output.segments import Segments
from batchinfer.job.run.run import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.stats.recorder import Recorder
from batchinfer.text.tokenizer import Tokenizer

PROMPT = "Row {row:07d} has a question of some sixty letters, and wants it"
OUTPUT_TOKENS = 32
TOKENS_PER_S = 20_000
MOST_MB_PER_100K_ROWS, MOST_RESUME_S, MOST_COMMIT_SHARE = 1.0, 10.0, 0.01
SETTLED_ROWS = 250_000
BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 20_000, 256
ROWS_PER_FILE = 100_000


def write_input(folder: Path, num_rows: int) -> None:
    """Prompts in files of ``ROWS_PER_FILE`` rows."""
    folder.mkdir(parents=True)
    for first in range(0, num_rows, ROWS_PER_FILE):
        rows = range(first, min(first + ROWS_PER_FILE, num_rows))
        table = pa.table({"prompt": [PROMPT.format(row=row) for row in rows]})
        pq.write_table(table, folder / f"{first:08d}.parquet", row_group_size=10_000)


def job(folder: Path) -> JobSpec:
    """The job, in ``folder``."""
    return JobSpec.model_validate(
        {
            "model": {"name": "stub"},
            "input": {"path": str(folder / "in")},
            "prompt": {"column": "prompt", "chat_template": "none"},
            "sampling": {"max_tokens": OUTPUT_TOKENS},
            "engine": {"max_num_seqs": 1024},
            "output": {"path": str(folder / "out")},
            "stats": {"every_steps": 20},
        }
    )


@dataclass(frozen=True)
class StubBuilt:
    """What ``build_engine`` returns, around a runner that computes nothing."""

    engine: Engine
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int] = frozenset({EOS})
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = 257
    adapters: Mapping[str, int] = field(default_factory=dict)
    block_size: int = BLOCK_SIZE
    num_blocks: int = NUM_BLOCKS
    bytes_per_block: int = 1024
    device: str = "stub"
    model_facts: dict[str, Any] = field(default_factory=lambda: {"name": "stub"})
    kernels: dict[str, str] = field(default_factory=dict)

    def device_bytes(self) -> int:
        return 0


def build(model: object, engine: EngineConfig, *, log: Callable[[str], None]) -> StubBuilt:
    """In place of ``build_engine``."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=True)
    table = SequenceTable(engine.max_num_seqs, MAX_MODEL_LEN, BLOCK_SIZE)
    stub = Engine(Scheduler(pool, table, engine.max_num_batched_tokens), StubRunner())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({text: at for at, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(
        backend, chat_template=None, special_tokens={}, control_tokens=frozenset()
    )
    return StubBuilt(stub, tokenizer)


class Stopwatch:
    """Adds up the time spent in functions, however they are nested."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def time(self, owner: Any, name: str) -> None:
        """Time calls of ``owner.name``; all of them are made in one thread."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return function(*arguments, **named)
            self._inside, began = True, time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)


def run_here(folder: Path) -> None:
    """Run the job in this process; what it took goes to ``folder/run.json``."""
    commits = Stopwatch()
    for owner, name in ((part_writer, "commit"), (Segments, "add"), (Recorder, "checkpoint")):
        commits.time(owner, name)
    began = time.perf_counter()
    first_step: list[float] = []
    step = Engine.step

    def note_first(self: Engine) -> Any:
        if not first_step:
            first_step.append(time.perf_counter() - began)
        return step(self)

    Engine.step = note_first  # type: ignore[method-assign]
    code = run_job(job(folder), quiet=True, build=build)  # type: ignore[arg-type]
    facts = {
        "code": int(code),
        "first_step_s": first_step[0],
        "commit_s": commits.seconds,
        "total_s": time.perf_counter() - began,
    }
    (folder / "run.json").write_text(json.dumps(facts))


def kill_on_its_way(folder: Path, num_rows: float) -> None:
    """Run the job in a process, and kill that when ``num_rows`` rows are in parts."""
    process = start(folder)
    records = folder / "out" / "_batchinfer" / "parts"
    wanted = num_rows / 4096
    while len(list(records.glob("*.json"))) < wanted:
        if process.poll() is not None:
            raise SystemExit(f"the job ended with {process.returncode}")
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


def start(folder: Path) -> subprocess.Popen[bytes]:
    """This program, as the process that runs the job."""
    return subprocess.Popen([sys.executable, __file__, "--folder", str(folder), "--here"])


def growth(folder: Path) -> tuple[float, float]:
    """Growth of resident memory in the first run, MB per 100,000 rows, and the most, in MB."""
    steps = pq.read_table(folder / "out" / "stats" / "steps.parquet")
    first = steps.filter(pc.equal(steps["run_id"], steps["run_id"][0]))
    rows = np.cumsum(first["decode_tokens"].to_numpy()) / OUTPUT_TOKENS
    megabytes = first["host_rss_bytes"].to_numpy() / 1e6
    settled = rows > rows[-1] / 4
    slope = np.polyfit(rows[settled], megabytes[settled], 1)[0]
    return float(slope * 1e5), pc.max(steps["host_rss_bytes"]).as_py() / 1e6


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="A job of many short rows without a model.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kill-at", type=float, default=0.9, help="share of the rows done by then")
    parser.add_argument("--folder", type=Path, help="for data and output; kept")
    parser.add_argument("--slack", type=float, default=1.0, help="factor on bounds of time")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        run_here(options.folder)
        return 0
    folder = options.folder or Path(tempfile.mkdtemp(prefix="million-"))
    write_input(folder / "in", options.rows)
    began = time.perf_counter()
    kill_on_its_way(folder, options.rows * options.kill_at)
    killed_s = time.perf_counter() - began
    process = start(folder)
    if process.wait():
        raise SystemExit(f"the job ended with {process.returncode}")
    right = report(folder, options.rows, killed_s, options.slack)
    if options.folder is None:
        shutil.rmtree(folder)
    return 0 if right else 1


def report(folder: Path, num_rows: int, killed_s: float, slack: float) -> bool:
    """Print what was found; whether all is as it must be."""
    facts = json.loads((folder / "run.json").read_text())
    summary = json.loads((folder / "out" / "summary.json").read_text())
    slope, most_mb = growth(folder)
    # Of the run that went on, and of what it computed.
    share_of_rows = 1 - _rows_kept(folder) / num_rows
    tokens = sum(summary["tokens"][name] for name in ("prompt", "output")) * share_of_rows
    share = facts["commit_s"] / (tokens / TOKENS_PER_S)
    per_row = facts["commit_s"] / (num_rows * share_of_rows)
    rows_per_s = num_rows * share_of_rows / facts["total_s"]
    print(f"rows     {num_rows:,}, {summary['rows']['ok']:,} ok, {rows_per_s:,.0f} rows/s")
    print(f"memory   {slope:+.2f} MB per 100,000 rows, {most_mb:,.0f} MB at most")
    print(f"resume   {facts['first_step_s']:.2f} s to the first step (killed at {killed_s:.0f} s)")
    print(
        f"commits  {facts['commit_s']:.1f} s, {share:.2%} of the time of the tokens, "
        f"{per_row * 1e6:.1f} us a row"
    )
    return (
        summary["rows"]["ok"] == num_rows
        and (num_rows < SETTLED_ROWS or slope < MOST_MB_PER_100K_ROWS)
        and facts["first_step_s"] < slack * MOST_RESUME_S
        and share < slack * MOST_COMMIT_SHARE
    )


def _rows_kept(folder: Path) -> int:
    """Rows that the killed run had finished."""
    runs = folder / "out" / "_batchinfer" / "runs"
    return int(json.loads((runs / "run-00001.json").read_text())["rows"])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
