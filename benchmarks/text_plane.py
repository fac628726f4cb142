"""Measures rows per second from a dataset to prompts: reading, templates and tokenizing.

    python benchmarks/text_plane.py [--seconds 3] [--rounds 3]

Uses two datasets with the quickstart's tokenizer and chat template: the quickstart's prompts (about
700 characters, from two columns), and prompts of 64 characters. Prints rows per second of wall
time, and microseconds of processor time per row in this process and in its children.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.builders.tokenizer import make_tokenizer
from batchinfer.job.job import LoadedJob, load, open_input, open_job
from batchinfer.job.rows.read_prompts import read_prompts
from batchinfer.job.spec.spec import JobSpec

QUICKSTART = Path(__file__).parent.parent / "jobs" / "quickstart"
NUM_ROWS = 65_536
SHORT = "Row {row:07d} has a question of some sixty letters, and wants it"
MESSAGES = [
    {"role": "system", "content": "{{ instruction }}"},
    {"role": "user", "content": "{{ document }}"},
]


@dataclass(frozen=True)
class NoEngine:
    """Replaces the result of ``build_engine``, with only the attributes that are needed to make
    prompts."""

    tokenizer: Any
    eos_token_ids: frozenset[int] = frozenset({0})
    max_model_len: int = 1 << 20
    vocab_size: int = 1 << 20
    adapters: dict[str, int] = field(default_factory=dict)
    warm_up: None = None


def datasets(folder: Path) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Yield name, file and ``prompt`` setting of each dataset."""
    rows = pq.read_table(QUICKSTART / "prompts.parquet")
    path = folder / "quickstart.parquet"
    pq.write_table(pa.concat_tables([rows] * (NUM_ROWS // len(rows))), path)
    yield "quickstart", path, {"messages": MESSAGES}
    path = folder / "short.parquet"
    pq.write_table(pa.table({"prompt": [SHORT.format(row=row) for row in range(NUM_ROWS)]}), path)
    yield "64 characters", path, {"column": "prompt"}


def rows_per_second(spec: JobSpec, seconds: float) -> str:
    """Read a job's rows repeatedly for ``seconds``, and return the rates as text."""
    job = open_job(spec, open_input(spec))
    tokenizer = make_tokenizer(spec.model.config())
    loaded: LoadedJob | None = load(job, lambda *_, **__: NoEngine(tokenizer))
    assert loaded is not None
    with closing(loaded) if hasattr(loaded, "close") else nullcontext():
        reader, parts = loaded.reader, job.manifest.parts()
        # Load everything before the clock starts.
        next(read_prompts(job.source.batches(reader.columns, parts), reader))
        rows, began, used, of_children = 0, time.perf_counter(), time.process_time(), _children()
        while time.perf_counter() < began + seconds:
            for batch in read_prompts(job.source.batches(reader.columns, parts), reader):
                rows += len(batch)
                if time.perf_counter() >= began + seconds:
                    break
        took = time.perf_counter() - began
        used, of_children = time.process_time() - used, _children() - of_children
    return (
        f"{rows / took:9,.0f} rows/s; processor: {used / rows * 1e6:6.1f} us per row here, "
        f"{of_children / rows * 1e6:6.1f} in children"
    )


def _children() -> float:
    times = (child.cpu_times() for child in psutil.Process().children(recursive=True))
    return sum(time.user + time.system for time in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what, path, prompt in datasets(folder):
            spec = JobSpec.model_validate(
                {
                    "model": {"name": str(QUICKSTART / "model")},
                    "input": {"path": str(path)},
                    "prompt": prompt,
                    "sampling": {"max_tokens": 16},
                    "output": {"path": str(folder / "out")},
                }
            )
            for _ in range(options.rounds):
                print(f"{what:14} {rows_per_second(spec, options.seconds)}", flush=True)


if __name__ == "__main__":
    main()
