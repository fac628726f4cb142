"""Jobs on fleets of engines without a model; their output must equal that of one process."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.errors import ExitCode
from batchinfer.job.fleet.run_fleet import run_fleet
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from tests.job.fakes import FakeBuild, drawn, job


def write_rows(folder: Path, count: int) -> None:
    """Write a dataset of ``count`` short prompts, all different."""
    (folder / "in").mkdir(parents=True, exist_ok=True)
    prompts = [f"row {row} {'x' * (row % 37)}" for row in range(count)]
    pq.write_table(pa.table({"prompt": prompts}), folder / "in" / "rows.parquet")


def fleet_job(folder: Path, **sections: dict[str, Any]) -> JobSpec:
    """Return a job on the dataset of ``write_rows``, with two workers and parts of 64 rows."""
    given = {
        "output": {"path": str(folder / "out"), "rows_per_part": 64},
        "engine": {"max_num_seqs": 16},
        "scale": {"workers": 2, "min_workers": 2},
    }
    for name, values in sections.items():
        given[name] = {**given.get(name, {}), **values}
    return job(folder, **given)


def run(spec: JobSpec, build: Any = None, **options: Any) -> ExitCode:
    """Run a job on its fleet; ``build`` replaces the engines of ``FakeBuild``."""
    chosen = run_fleet if spec.scale.workers != 1 else None
    return run_job(
        spec, build=build or FakeBuild(next_token=drawn), quiet=True, fleet=chosen, **options
    )


def part_hashes(out: Path) -> dict[str, str]:
    """Return the hash of each part, keyed by file name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((out / "data").iterdir())
    }


def expected(folder: Path, spec: JobSpec) -> dict[str, str]:
    """Run the job in one process, into another folder; return the hashes of its parts."""
    alone = spec.model_copy(
        update={
            "output": spec.output.model_copy(update={"path": str(folder / "alone")}),
            "scale": spec.scale.model_copy(update={"workers": 1}),
        }
    )
    assert run(alone) == ExitCode.OK
    return part_hashes(folder / "alone")
