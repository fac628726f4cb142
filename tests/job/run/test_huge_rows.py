"""A row of 100 MB becomes an error, and takes only a few times its size in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import polars as pl
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.run.run_job import run_job
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job

ROW_BYTES = 100_000_000
MARGIN = 0.2
"""Memory that the first job may leave behind, as a share of the huge row's size."""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads its peak from /proc")
@pytest.mark.parametrize(("kept", "times"), [(False, 3), (True, 4)], ids=["left out", "kept"])
def test_huge_row_takes_few_times_its_size(tmp_path: Path, kept: bool, times: int) -> None:
    huge = Random(0).randbytes(ROW_BYTES // 2).hex()
    texts = [*["small"] * 50, huge, *["small"] * 49]
    write_parquet(tmp_path / "huge" / "in" / "x.parquet", {"text": texts})
    write_parquet(tmp_path / "small" / "in" / "x.parquet", {"text": ["small"] * 100})
    del texts
    code = "import sys; from tests.job.run.test_huge_rows import run_both; run_both(*sys.argv[1:])"

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "kept" if kept else ""],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )

    before, peak = map(int, done.stdout.split())
    assert peak - before < (times + MARGIN) * ROW_BYTES
    rows = pl.read_parquet(tmp_path / "huge" / "out" / "data" / "*.parquet")
    codes = [error and error["code"] for error in rows["error"].to_list()]
    assert codes == [*[None] * 50, "row_too_large", *[None] * 49]
    if kept:
        assert rows["text"][50] == huge
        files = sorted((tmp_path / "huge" / "out" / "data").iterdir())
        assert [len(pq.read_table(file)) for file in files] == [10] * 10


def run_both(folder: str, kept: str) -> None:
    """Run a job with small rows, then a job with a huge row; print the peak memory after each."""
    for name in ("small", "huge"):
        spec = job(
            Path(folder) / name,
            input={"path": str(Path(folder) / name / "in"), "keep_columns": ["text"] * bool(kept)},
            prompt={"column": "text"},
            sampling={"max_tokens": 1},
            errors={"max_error_rate": 1.0},
        )
        assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK  # type: ignore[arg-type]
        status = Path("/proc/self/status").read_text(encoding="ascii")
        print(int(status.partition("VmHWM:")[2].split()[0]) * 1024, flush=True)
