r"""Measures memory, resuming and commits of a job with many short rows and a fake model.

    python benchmarks/million_rows.py [--rows 1000000] [--folder DIR] [--slack 1]
    python benchmarks/million_rows.py --rows 400000 --kill-at 0 --blocks 2048
    python benchmarks/million_rows.py --rows 200000 --kill-at 0 --blocks 2048 --order input \
        --prefixes 10000

Only the engine's runner is fake: it returns one token immediately, and writes to host memory when a
block is swapped out. The job is killed (kill -9) after nine tenths of its rows, then resumed. With
``--prefixes N``, each row begins with one of N texts, chosen at random. Prints the following
numbers, and exits with code 1 if a bound is exceeded:

- memory: growth of resident memory over the last three quarters of the first run (least squares),
  at most 1 MB per 100,000 rows; the peak of the last run; and the peak of its child processes
  together, without shared memory;
- swap: blocks that the last run copied to the host; at most 1 % of them are never used again;
- resume: time from the call to ``run_job`` to the first step of the resumed run, at most 10 s;
- commits: seconds for writing segments, parts and records, at most 1 % of the time that the job's
  tokens (prompts and outputs) take at 20,000 tokens/s.

The allocators' heaps settle after about half a million rows. Until then, their free space grows by
2 MB per 100,000 rows, while memory in use (Python's objects, malloc, Arrow) stays within 0.2 MB.
Jobs with less than a quarter of a million rows are not checked for growth of memory.
``--slack`` multiplies the time bounds, for busy machines.
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
from batchinfer.job.claims import part_queue
from batchinfer.job.output import part_writer
from batchinfer.job.output.finished_row_segments import Segments
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.stats.run_record import RunRecorder
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
    """Write prompts to files of ``ROWS_PER_FILE`` rows."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for first in range(0, num_rows, ROWS_PER_FILE):
        rows = range(first, min(first + ROWS_PER_FILE, num_rows))
        prompts = [PROMPT.format(row=row) for row in rows]
        if num_prefixes:
            drawn = rng.integers(num_prefixes, size=len(prompts)).tolist()
            pairs = zip(drawn, prompts, strict=True)
            prompts = [f"Text {at:07d} that many rows begin with. {text}" for at, text in pairs]
        table = pa.table({"prompt": prompts})
        pq.write_table(table, folder / f"{first:08d}.parquet", row_group_size=10_000)


def job(folder: Path, num_blocks: int, order: str) -> JobSpec:
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
    """A stub runner that writes to host memory when a block is swapped out."""

    num_out = 0

    def __init__(self, num_host_blocks: int) -> None:
        self._host = np.zeros((num_host_blocks, BYTES_PER_BLOCK), np.uint8)
        self._unread: set[int] = set()
        self._num_overwritten = 0

    def submit(self, step: Step) -> Ready:
        """Simulate the step's swaps."""
        for slot in step.swap_outs[:, 1].tolist():
            self._host[slot] = 1
            self._num_overwritten += slot in self._unread
            self._unread.add(slot)
        self.num_out += len(step.swap_outs)
        self._unread.difference_update(step.swap_ins[:, 0].tolist())
        return super().submit(step)

    @property
    def num_unread(self) -> int:
        """Number of blocks that were copied to the host and never used again."""
        return self._num_overwritten + len(self._unread)


@dataclass(frozen=True)
class StubBuilt:
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
    slots_per_state: int = 0
    images: None = None
    warm_up: None = None

    def device_bytes(self) -> int:
        return 0


def build(
    runner: SwappingStub,
    model: object,
    engine: EngineConfig,
    *,
    log: Callable[[str], None],
    **_: object,
) -> StubBuilt:
    """Replace ``build_engine``, with a runner that computes nothing."""
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
    return engine.swap_bytes // BYTES_PER_BLOCK


class Stopwatch:
    """Sums the time spent in functions. A timed function may call another timed function."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def time(self, owner: Any, name: str) -> None:
        """Time calls of ``owner.name``, which must all be in one thread."""
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
    """Run the job in this process, and write measurements to ``folder/run.json``."""
    runner = SwappingStub(host_blocks(spec.engine))
    commits = Stopwatch()
    parts = ((part_writer, "stage"), (part_queue, "publish"))
    for owner, name in (*parts, (Segments, "add"), (RunRecorder, "checkpoint")):
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
    status = Path("/proc/self/status").read_text()
    (peak,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peak.split()[1]) * 1024


def kill_on_its_way(process: subprocess.Popen[bytes], folder: Path, num_rows: float) -> None:
    """Kill the job's process once finished parts hold ``num_rows`` rows."""
    records = folder / "out" / "_batchinfer" / "parts"
    wanted = num_rows / 4096
    while len(list(records.glob("*.json"))) < wanted:
        if process.poll() is not None:
            raise SystemExit(f"the job exited with {process.returncode}")
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


def start(folder: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start this program as the process that runs the job."""
    same = ["--blocks", str(options.blocks), "--order", options.order]
    return subprocess.Popen([sys.executable, __file__, "--folder", str(folder), "--here", *same])


def wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the job's end, and return the peak unshared bytes of its child processes."""
    most, job_process = 0, psutil.Process(process.pid)
    while process.poll() is None:
        with suppress(psutil.Error):
            memory = [child.memory_info() for child in job_process.children(recursive=True)]
            most = max(most, sum(child.rss - child.shared for child in memory))
        time.sleep(0.5)
    if process.returncode:
        raise SystemExit(f"the job exited with {process.returncode}")
    return most


def growth(folder: Path) -> float:
    """Return the growth of resident memory in the first run, in MB per 100,000 rows."""
    steps = pq.read_table(folder / "out" / "stats" / "steps.parquet")
    first = steps.filter(pc.equal(steps["run_id"], steps["run_id"][0]))
    rows = np.cumsum(first["decode_tokens"].to_numpy()) / OUTPUT_TOKENS
    megabytes = first["host_rss_bytes"].to_numpy() / 1e6
    settled = rows > rows[-1] / 4
    slope = np.polyfit(rows[settled], megabytes[settled], 1)[0]
    return float(slope * 1e5)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a job with many short rows without a model.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--prefixes", type=int, default=0, help="number of shared prefixes")
    parser.add_argument("--blocks", type=int, default=20_000, help="KV blocks")
    parser.add_argument("--order", choices=["prefix", "input"], default="prefix")
    parser.add_argument(
        "--kill-at", type=float, default=0.9, help="kill after this share of the rows; 0: never"
    )
    parser.add_argument("--folder", type=Path, help="folder for data and output; not deleted")
    parser.add_argument("--slack", type=float, default=1.0, help="factor for the time bounds")
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
    """Print the measurements, and return True if all bounds hold."""
    facts = json.loads((folder / "run.json").read_text())
    summary = json.loads((folder / "out" / "summary.json").read_text())
    slope = growth(folder)
    unread, blocks_out = facts["blocks_unread"], facts["blocks_out"]
    # The resumed run computed this share of the rows.
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
    print(f"swap     {blocks_out:,} blocks copied to the host, {unread:,} of them never used again")
    killed = "" if killed_s is None else f" (killed at {killed_s:.0f} s)"
    print(f"resume   {facts['first_step_s']:.2f} s to the first step{killed}")
    print(
        f"commits  {facts['commit_s']:.1f} s, {share:.2%} of the time of the tokens, "
        f"{per_row * 1e6:.1f} us per row"
    )
    return (
        summary["rows"]["ok"] == num_rows
        and (num_rows < SETTLED_ROWS or slope < MOST_MB_PER_100K_ROWS)
        and unread <= MOST_UNREAD_SHARE * blocks_out
        and facts["first_step_s"] < slack * MOST_RESUME_S
        and share < slack * MOST_COMMIT_SHARE
    )


def _rows_kept(folder: Path) -> int:
    runs = folder / "out" / "_batchinfer" / "runs"
    return int(json.loads((runs / "run-00001.json").read_text())["rows"])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
