"""Measures a large job that reuses nearly all rows of another job's output, without a model.

    python benchmarks/reuse.py [--rows 1000000] [--new 1000] [--folder DIR] [--json FILE]

The first job measures the cost of row keys: it has a tenth of ``--rows`` rows, and a runner that
computes nothing. A second job, with all rows, makes the output to reuse, with the same answer for
every row. Two more jobs reuse this output. The third job has ``--new`` additional rows at the end
of its input. In the fourth job's input, ``--new`` random rows are replaced, so that nearly every
part has new rows. Prints, for each measured job, seconds of wall time and of processor time
(including children), computed rows, the share of the processor time that row keys take, and bytes
of keys per row on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from million_rows import PROMPT, ROWS_PER_FILE, SwappingStub, build
from result_files import write_results

from batchinfer.errors import ExitCode
from batchinfer.job.job import Job
from batchinfer.job.output.finished_row_segments import (
    CONTROL_TEXT_COLUMN,
    REQUEST_COLUMN,
    segment_schema,
)
from batchinfer.job.reuse.reuse import FoundRows, RowReuse
from batchinfer.job.rows.row_key import KEY_COLUMN, KEY_TYPE, RowKeys
from batchinfer.job.run import pipeline
from batchinfer.job.run import run_job as run_module
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.requests.requests import PromptRow

_BLOCKS = 4096


class TimedKeys(RowKeys):
    """Sums the processor time of computing row keys."""

    seconds = 0.0

    def with_keys(self, batches: Iterator[list[PromptRow]]) -> Iterator[list[PromptRow]]:
        for batch in batches:
            began = time.thread_time()
            (keyed,) = super().with_keys(iter([batch]))
            TimedKeys.seconds += time.thread_time() - began
            yield keyed


def write_input(folder: Path, prompts: list[str]) -> None:
    """Write prompts to files of ``ROWS_PER_FILE`` rows."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for first in range(0, len(prompts), ROWS_PER_FILE):
        table = pa.table({"prompt": prompts[first : first + ROWS_PER_FILE]})
        pq.write_table(table, folder / f"{first:08d}.parquet", row_group_size=10_000)


def spec(folder: Path, out: str, *others: str) -> JobSpec:
    """Return a job with the input ``folder/in``."""
    return JobSpec.model_validate(
        {
            "model": {"name": "stub"},
            "input": {"path": str(folder / "in")},
            "prompt": {"column": "prompt", "chat_template": "none"},
            "sampling": {"max_tokens": 4, "temperature": 0.0},
            "engine": {"max_num_seqs": 1024, "num_kv_blocks": _BLOCKS},
            "output": {
                "path": str(folder / out),
                "reuse": [str(folder / other) for other in others],
            },
            "stats": {"every_steps": 20},
        }
    )


def processor_s() -> float:
    """Return the processor time of this process and of its finished children."""
    times = psutil.Process().cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def measured(folder: Path, out: str, *others: str) -> dict[str, Any]:
    TimedKeys.seconds = 0.0
    before, began = processor_s(), time.perf_counter()
    stub = partial(build, SwappingStub(1 << 20))
    code = run_job(spec(folder, out, *others), build=stub, quiet=True)
    wall_s, cpu_s = time.perf_counter() - began, processor_s() - before
    assert code is ExitCode.OK
    rows = json.loads((folder / out / "summary.json").read_bytes())["rows"]
    keys = (folder / out / "_batchinfer" / "keys").iterdir()
    return {
        "rows": rows["total"],
        "computed": rows["total"] - rows["reused"],
        "wall_s": round(wall_s, 2),
        "processor_s": round(cpu_s, 2),
        "key_us_per_row": round(TimedKeys.seconds / rows["total"] * 1e6, 2),
        "key_share": round(TimedKeys.seconds / cpu_s, 4),
        "key_bytes_per_row": round(sum(p.stat().st_size for p in keys) / rows["total"], 1),
    }


class OneAnswer(RowReuse):
    """Replaces the search in other outputs. Every row is found, with the same answer."""

    def __init__(self, outputs: Any, generated: pa.Schema, warn: Any) -> None:
        super().__init__([], generated, warn)
        self._schema = generated
        output = {
            "index": 0,
            "text": "An answer of some letters",
            "finish_reason": "length",
            "num_tokens": 4,
            "cumulative_logprob": -4.0,
        }
        values = {
            "row_id": 0,
            "generated_text": output["text"],
            "outputs": [output],
            "num_prompt_tokens": 64,
            "num_output_tokens": 4,
            "truncated": False,
            "status": "ok",
        }
        self._answer = pa.Table.from_pylist([values], schema=generated)

    def without_found(
        self,
        batches: Iterator[list[PromptRow]],
        hand_over: Callable[[FoundRows], None],
        admit: Callable[[list[PromptRow]], list[PromptRow]] = lambda rows: rows,
    ) -> Iterator[list[PromptRow]]:
        """Return no rows, because all rows are reused."""
        for batch in batches:
            nowhere = np.zeros(len(batch), dtype=np.int64)
            hand_over(
                FoundRows(
                    np.array([row.row_id for row in batch]),
                    pa.array([row.key for row in batch], KEY_TYPE),
                    nowhere.astype(np.bool_),
                    nowhere.astype(np.int32),
                    nowhere,
                )
            )
        yield from ()

    def copied(self, found: FoundRows) -> Iterator[pa.Table]:
        """Return the rows with the answer."""
        table = self._answer.take(pa.array(found.sources))
        schema = segment_schema(self._schema)
        own = {
            "row_id": pa.array(found.row_ids),
            REQUEST_COLUMN: pa.nulls(len(found), schema.field(REQUEST_COLUMN).type),
            CONTROL_TEXT_COLUMN: pa.array(found.has_control_text),
            KEY_COLUMN: found.keys,
        }
        yield pa.table(
            [
                own.get(name, table[name] if name in table.schema.names else None)
                for name in schema.names
            ],
            schema=schema,
        )


def timed_row_keys(job: Job, context: Any) -> RowKeys:
    """Replace ``job.row_keys``."""
    return TimedKeys(job.manifest.job, context.max_model_len, context.adapters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--new", type=int, default=1_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="reuse-"))
    pipeline.row_keys = timed_row_keys
    prompts = [PROMPT.format(row=row) for row in range(options.rows)]
    new = [f"A new question, number {row}" for row in range(options.new)]
    found: dict[str, Any] = {"cores": os.cpu_count()}
    try:
        write_input(folder / "in", prompts[: options.rows // 10])
        found["all computed"] = measured(folder, "computed")
        print(json.dumps(found), flush=True)
        write_input(folder / "in", prompts)
        run_module.RowReuse = OneAnswer  # type: ignore[misc]
        measured(folder, "first", "computed")
        run_module.RowReuse = RowReuse  # type: ignore[misc]
        write_input(folder / "in", [*prompts, *new])
        found["appended"] = measured(folder, "appended", "first")
        print(json.dumps(found["appended"]), flush=True)
        shutil.rmtree(folder / "appended")
        places = np.random.default_rng(0).choice(options.rows, options.new, replace=False)
        for place, prompt in zip(places.tolist(), new, strict=True):
            prompts[place] = prompt
        write_input(folder / "in", prompts)
        found["scattered"] = measured(folder, "scattered", "first")
        print(json.dumps(found["scattered"]), flush=True)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    found["load_average"] = round(os.getloadavg()[0], 2)
    if options.json is not None:
        write_results(options.json, found)


if __name__ == "__main__":
    main()
