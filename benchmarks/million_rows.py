"""A job of many short rows through everything but a model: memory, resume, cost of commits.

    python benchmarks/million_rows.py [--rows 1000000] [--folder DIR] [--slack 1]
    python benchmarks/million_rows.py --rows 400000 --kill-at 0 --blocks 2048
    python benchmarks/million_rows.py --rows 200000 --kill-at 0 --blocks 2048 --order input \
        --prefixes 10000

Reading, prompts, tokens, scheduling, texts, segments, parts and records are the real ones; the
engine's runner draws one token at once, and writes to host memory where a block is swapped out.
The job is killed at nine tenths (kill -9), then run to its end. With ``--prefixes`` each row begins
with one of so many texts, drawn at random.
Prints, and exits 1 where one is missed:

- memory: growth of the process's resident memory by rows finished, over the last three quarters of
  the first run, least squares; under 1 MB per 100,000 rows. And the most that the last run took,
  its end included, and its child processes together, without what these share;
- swap: blocks that the last run copied to the host; at most 1 % of them never come back;
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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from host import EOS, StubRunner
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.runner import Ready
from batchinfer.engine.scheduler.preemption import PreemptionPolicy
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.step import Step
from batchinfer.job.claims import queue
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
MOST_UNREAD_SHARE = 0.01
SETTLED_ROWS = 250_000
BLOCK_SIZE, MAX_MODEL_LEN = 16, 256
BYTES_PER_BLOCK, BLOCK_COPY_S = 8192, 1e-6
ROWS_PER_FILE = 100_000


def write_input(folder: Path, num_rows: int, num_prefixes: int) -> None:
    """Prompts in files of ``ROWS_PER_FILE`` rows."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for first in range(0, num_rows, ROWS_PER_FILE):
        rows = range(first, min(first + ROWS_PER_FILE, num_rows))
        prompts = [PROMPT.format(row=row) for row in rows]
        if num_prefixes:
            drawn = rng.integers(num_prefixes, size=len(prompts)).tolist()
            pairs = zip(drawn, prompts, strict=True)
            prompts = [f"Text {one:07d} that many rows begin with. {own}" for one, own in pairs]
        table = pa.table({"prompt": prompts})
        pq.write_table(table, folder / f"{first:08d}.parquet", row_group_size=10_000)


def job(folder: Path, num_blocks: int, order: str) -> JobSpec:
    """The job, in ``folder``."""
    return JobSpec.model_validate(
        {
            "model": {"name": "stub"},
            "input": {"path": str(folder / "in")},
            "prompt": {"column": "prompt", "chat_template": "none"},
            "sampling": {"max_tokens": OUTPUT_TOKENS},
            "engine": {"max_num_seqs": 1024, "num_kv_blocks": num_blocks, "order": order},
            "output": {"path": str(folder / "out")},
            "stats": {"every_steps": 20},
        }
    )


class SwappingStub(StubRunner):
    """Writes to host memory where a block goes there."""

    num_out = 0
    """Blocks copied to the host."""

    def __init__(self, num_host_blocks: int) -> None:
        self._host = np.zeros((num_host_blocks, BYTES_PER_BLOCK), np.uint8)
        self._unread: set[int] = set()
        self._num_overwritten = 0

    def submit(self, step: Step) -> Ready:
        """A result of the right shape."""
        for slot in step.swap_outs[:, 1].tolist():
            self._host[slot] = 1
            self._num_overwritten += slot in self._unread
            self._unread.add(slot)
        self.num_out += len(step.swap_outs)
        self._unread.difference_update(step.swap_ins[:, 0].tolist())
        return super().submit(step)

    @property
    def num_unread(self) -> int:
        """Blocks that went to the host and never came back."""
        return self._num_overwritten + len(self._unread)


@dataclass(frozen=True)
class StubBuilt:
    """What ``build_engine`` returns, around a runner that computes nothing."""

    engine: Engine
    tokenizer: Tokenizer
    num_blocks: int
    eos_token_ids: frozenset[int] = frozenset({EOS})
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = 257
    adapters: Mapping[str, int] = field(default_factory=dict)
    block_size: int = BLOCK_SIZE
    bytes_per_block: int = BYTES_PER_BLOCK
    device: str = "stub"
    model_facts: dict[str, Any] = field(default_factory=lambda: {"name": "stub"})
    kernels: dict[str, str] = field(default_factory=dict)
    shares_prefixes: bool = True
    warm_up: None = None

    def device_bytes(self) -> int:
        return 0


def build(
    runner: SwappingStub, model: object, engine: EngineConfig, *, log: Callable[[str], None]
) -> StubBuilt:
    """In place of ``build_engine``."""
    num_blocks = engine.num_kv_blocks
    assert num_blocks is not None
    pool = BlockPool(
        num_blocks, BLOCK_SIZE, enable_prefix_caching=True, num_host_blocks=host_blocks(engine)
    )
    table = SequenceTable(engine.max_num_seqs, MAX_MODEL_LEN, BLOCK_SIZE)
    policy = PreemptionPolicy(engine.preemption, BLOCK_COPY_S)
    stub = Engine(Scheduler(pool, table, engine.max_num_batched_tokens, policy), runner)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({text: at for at, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(
        backend, chat_template=None, special_tokens={}, control_tokens=frozenset()
    )
    return StubBuilt(stub, tokenizer, num_blocks)


def host_blocks(engine: EngineConfig) -> int:
    """Blocks that the swap space holds."""
    return engine.swap_bytes // BYTES_PER_BLOCK


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


def run_here(spec: JobSpec, folder: Path) -> None:
    """Run the job in this process; what it took goes to ``folder/run.json``."""
    runner = SwappingStub(host_blocks(spec.engine))
    commits = Stopwatch()
    parts = ((part_writer, "stage"), (queue, "publish"))
    for owner, name in (*parts, (Segments, "add"), (Recorder, "checkpoint")):
        commits.time(owner, name)
    began = time.perf_counter()
    first_step: list[float] = []
    step = Engine.step

    def note_first(self: Engine) -> Any:
        if not first_step:
            first_step.append(time.perf_counter() - began)
        return step(self)

    Engine.step = note_first  # type: ignore[method-assign]
    code = run_job(spec, quiet=True, build=partial(build, runner))  # type: ignore[arg-type]
    facts = {
        "code": int(code),
        "first_step_s": first_step[0],
        "commit_s": commits.seconds,
        "total_s": time.perf_counter() - began,
        "peak_bytes": peak_bytes(),
        "blocks_out": runner.num_out,
        "blocks_unread": runner.num_unread,
    }
    (folder / "run.json").write_text(json.dumps(facts))


def peak_bytes() -> int:
    """Most resident memory that this process has had."""
    status = Path("/proc/self/status").read_text()
    (peak,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peak.split()[1]) * 1024


def kill_on_its_way(process: subprocess.Popen[bytes], folder: Path, num_rows: float) -> None:
    """Kill the process that runs the job when ``num_rows`` rows are in parts."""
    records = folder / "out" / "_batchinfer" / "parts"
    wanted = num_rows / 4096
    while len(list(records.glob("*.json"))) < wanted:
        if process.poll() is not None:
            raise SystemExit(f"the job ended with {process.returncode}")
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


def start(folder: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """This program, as the process that runs the job."""
    same = ["--blocks", str(options.blocks), "--order", options.order]
    return subprocess.Popen([sys.executable, __file__, "--folder", str(folder), "--here", *same])


def wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the job's end; most bytes that its child processes had for themselves together.

    Raises:
        SystemExit: the job failed.
    """
    most, job_process = 0, psutil.Process(process.pid)
    while process.poll() is None:
        with suppress(psutil.Error):
            memory = [child.memory_info() for child in job_process.children(recursive=True)]
            most = max(most, sum(one.rss - one.shared for one in memory))
        time.sleep(0.5)
    if process.returncode:
        raise SystemExit(f"the job ended with {process.returncode}")
    return most


def growth(folder: Path) -> float:
    """Growth of resident memory in the first run, MB per 100,000 rows."""
    steps = pq.read_table(folder / "out" / "stats" / "steps.parquet")
    first = steps.filter(pc.equal(steps["run_id"], steps["run_id"][0]))
    rows = np.cumsum(first["decode_tokens"].to_numpy()) / OUTPUT_TOKENS
    megabytes = first["host_rss_bytes"].to_numpy() / 1e6
    settled = rows > rows[-1] / 4
    slope = np.polyfit(rows[settled], megabytes[settled], 1)[0]
    return float(slope * 1e5)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="A job of many short rows without a model.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--prefixes", type=int, default=0, help="texts that rows begin with")
    parser.add_argument("--blocks", type=int, default=20_000, help="KV blocks")
    parser.add_argument("--order", choices=["prefix", "input"], default="prefix")
    parser.add_argument(
        "--kill-at", type=float, default=0.9, help="share of the rows done by then; 0: no kill"
    )
    parser.add_argument("--folder", type=Path, help="for data and output; kept")
    parser.add_argument("--slack", type=float, default=1.0, help="factor on bounds of time")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        run_here(job(options.folder, options.blocks, options.order), options.folder)
        return 0
    folder = options.folder or Path(tempfile.mkdtemp(prefix="million-"))
    write_input(folder / "in", options.rows, options.prefixes)
    began = time.perf_counter()
    if options.kill_at:
        kill_on_its_way(start(folder, options), folder, options.rows * options.kill_at)
    killed_s = time.perf_counter() - began if options.kill_at else None
    child_bytes = wait(start(folder, options))
    right = report(folder, options.rows, killed_s, options.slack, child_bytes)
    if options.folder is None:
        shutil.rmtree(folder)
    return 0 if right else 1


def report(
    folder: Path, num_rows: int, killed_s: float | None, slack: float, child_bytes: int
) -> bool:
    """Print what was found; whether all is as it must be."""
    facts = json.loads((folder / "run.json").read_text())
    summary = json.loads((folder / "out" / "summary.json").read_text())
    slope = growth(folder)
    unread, blocks_out = facts["blocks_unread"], facts["blocks_out"]
    # Of the run that went on, and of what it computed.
    share_of_rows = 1 - (0 if killed_s is None else _rows_kept(folder) / num_rows)
    tokens = sum(summary["tokens"][name] for name in ("prompt", "output")) * share_of_rows
    share = facts["commit_s"] / (tokens / TOKENS_PER_S)
    per_row = facts["commit_s"] / (num_rows * share_of_rows)
    rows_per_s = num_rows * share_of_rows / facts["total_s"]
    print(f"rows     {num_rows:,}, {summary['rows']['ok']:,} ok, {rows_per_s:,.0f} rows/s")
    print(
        f"memory   {slope:+.2f} MB per 100,000 rows, {facts['peak_bytes'] / 1e6:,.0f} MB at most, "
        f"child processes {child_bytes / 1e6:,.0f} MB"
    )
    print(f"swap     {blocks_out:,} blocks to the host, {unread:,} of them never back")
    killed = "" if killed_s is None else f" (killed at {killed_s:.0f} s)"
    print(f"resume   {facts['first_step_s']:.2f} s to the first step{killed}")
    print(
        f"commits  {facts['commit_s']:.1f} s, {share:.2%} of the time of the tokens, "
        f"{per_row * 1e6:.1f} us a row"
    )
    return (
        summary["rows"]["ok"] == num_rows
        and (num_rows < SETTLED_ROWS or slope < MOST_MB_PER_100K_ROWS)
        and unread <= MOST_UNREAD_SHARE * blocks_out
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
