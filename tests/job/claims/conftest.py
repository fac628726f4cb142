from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from tests.job.claims.jobs import NUM_ROWS, data
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    prompts = [f"{row if row % 5 else 'x'} asks" for row in range(NUM_ROWS)]
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": prompts})
    return job(tmp_path)


@pytest.fixture
def plain(spec: JobSpec, tmp_path: Path) -> dict[str, bytes]:
    """Return the bytes of the parts that a single run writes."""
    alone = job(tmp_path, output={"path": str(tmp_path / "alone")})
    assert run_job(alone, build=FakeBuild(), quiet=True) is ExitCode.OK
    return data(alone)
