"""Whole jobs over inputs that are not all alike."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import DataError, ExitCode
from batchinfer.job.run.run import run_job
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, TellingBuild, job


def output(tmp_path: Path) -> pa.Table:
    return pq.read_table(sorted((tmp_path / "out" / "data").iterdir()))


def stopped(at: int) -> FakeBuild:
    """Builds an engine whose run is stopped at a step."""

    def stop(step: int) -> None:
        if step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    build = FakeBuild(max_num_seqs=4)
    build.before_step = stop
    return build


def test_files_with_other_columns_are_one_job_to_its_end(tmp_path: Path) -> None:
    for at, columns in enumerate(
        (
            {"prompt": [f"a{row}" for row in range(12)], "n": pa.array(range(12), pa.int32())},
            {"prompt": pa.array([f"b{row}" for row in range(12)]).dictionary_encode()},
            {
                "n": [2**40] * 12,
                "prompt": pa.array([f"c{r}" for r in range(12)], pa.large_string()),
            },
        )
    ):
        write_parquet(tmp_path / "in" / f"{at}.parquet", columns)
    spec = job(tmp_path, input={"schema": "union"}, output={"rows_per_part": 8})
    with pytest.raises(DataError, match=r"differ in column .*\n.*\n.*\nset input\.schema: union"):
        run_job(job(tmp_path), build=FakeBuild())
    assert run_job(spec, build=stopped(at=12)) is ExitCode.INTERRUPTED
    again = TellingBuild(max_num_seqs=4)
    assert run_job(spec, build=again) is ExitCode.OK
    assert 0 < len(again.ran) < 36
    table = output(tmp_path)
    assert table["n"].to_pylist() == [*range(12), *[None] * 12, *[2**40] * 12]
    expected = [f"{name}{row}" for name in "abc" for row in range(12)]
    assert table["generated_text"].to_pylist() == table["prompt"].to_pylist() == expected


def test_a_job_that_could_be_strict_goes_on_as_a_union(tmp_path: Path) -> None:
    prompts = [f"number {row}" for row in range(40)]
    write_parquet(tmp_path / "in" / "a.parquet", {"prompt": prompts[:20], "junk": [1] * 20})
    write_parquet(tmp_path / "in" / "b.parquet", {"prompt": prompts[20:], "junk": ["x"] * 20})
    kept = {"keep_columns": ["prompt"]}
    assert run_job(job(tmp_path, input=kept), build=stopped(at=9)) is ExitCode.INTERRUPTED
    spec = job(tmp_path, input={**kept, "schema": "union"})
    assert run_job(spec, build=FakeBuild()) is ExitCode.OK
    assert output(tmp_path)["generated_text"].to_pylist() == [text[:8] for text in prompts]
