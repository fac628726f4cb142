"""Jobs whose input files differ in columns, or have bad ids."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import DataError, ExitCode
from batchinfer.job.run import run_job as run_module
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.sections import ErrorsSpec
from batchinfer.job.spec.spec import JobSpec
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, TellingBuild, job
from tests.job.run.outputs import output


def stopped(at: int) -> FakeBuild:
    """Build an engine that stops its run at a step."""

    def stop(step: int) -> None:
        if step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    build = FakeBuild(max_num_seqs=4)
    build.before_step = stop
    return build


def test_union_of_files_with_different_columns_resumes(tmp_path: Path) -> None:
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


def test_strict_job_resumes_as_union(tmp_path: Path) -> None:
    prompts = [f"number {row}" for row in range(40)]
    write_parquet(tmp_path / "in" / "a.parquet", {"prompt": prompts[:20], "junk": [1] * 20})
    write_parquet(tmp_path / "in" / "b.parquet", {"prompt": prompts[20:], "junk": ["x"] * 20})
    kept = {"keep_columns": ["prompt"]}
    assert run_job(job(tmp_path, input=kept), build=stopped(at=9)) is ExitCode.INTERRUPTED
    spec = job(tmp_path, input={**kept, "schema": "union"})
    assert run_job(spec, build=FakeBuild()) is ExitCode.OK
    assert output(tmp_path)["generated_text"].to_pylist() == [text[:8] for text in prompts]


def with_bad_ids(tmp_path: Path, **sections: dict[str, Any]) -> JobSpec:
    """Return a job of 40 rows: row 7 has no id, and rows 11 and 33 repeat the id of row 4."""
    ids = [None if row == 7 else 4 if row in (11, 33) else row for row in range(40)]
    rows = {"prompt": [f"number {row}" for row in range(40)], "id": ids}
    write_parquet(tmp_path / "in" / "x.parquet", rows)
    sections["input"] = {"id_column": "id", **sections.get("input", {})}
    return job(tmp_path, **sections)


def errors(tmp_path: Path) -> dict[int, tuple[str, str]]:
    rows = output(tmp_path).to_pylist()
    return {row["row_id"]: tuple(row["error"].values()) for row in rows if row["error"]}


BAD = {
    7: ("missing_id", 'input.id_column: the row has no value in "id"'),
    11: ("duplicate_id", 'input.id_column: row 4 has the same value in "id"'),
    33: ("duplicate_id", 'input.id_column: row 4 has the same value in "id"'),
}


def test_bad_ids_are_error_rows(tmp_path: Path) -> None:
    spec = with_bad_ids(tmp_path)
    build = TellingBuild()
    assert run_job(spec, build=build) is ExitCode.TOO_MANY_ROW_ERRORS
    assert errors(tmp_path) == BAD
    assert sorted(build.ran) == [row for row in range(40) if row not in BAD]
    table = output(tmp_path)
    assert table["id"].to_pylist()[4:12] == [4, 5, 6, None, 8, 9, 10, 4]
    assert table["generated_text"].null_count == 3
    allowed = spec.model_copy(update={"errors": ErrorsSpec(max_error_rate=0.1)})
    assert run_job(allowed, build=FakeBuild()) is ExitCode.OK


@pytest.mark.parametrize("stored", ["kept", "gone", "damaged", "of another input"])
def test_resumed_run_finds_the_same_bad_ids(tmp_path: Path, stored: str, monkeypatch: Any) -> None:
    spec = with_bad_ids(tmp_path, errors={"max_error_rate": 0.1})
    assert run_job(spec, build=stopped(at=12)) is ExitCode.INTERRUPTED
    kept = tmp_path / "out" / "_batchinfer" / "bad_ids.parquet"
    if stored == "gone":
        kept.unlink()
    elif stored == "damaged":
        kept.write_bytes(kept.read_bytes()[:-9])
    elif stored == "of another input":
        pq.write_table(pa.table({"row_id": [0], "first_row_id": [-1]}), kept)
    searched = []
    find = run_module.find_bad_ids
    monkeypatch.setattr(
        run_module, "find_bad_ids", lambda *args: (searched.append(args), find(*args))[1]
    )
    assert run_job(spec, build=FakeBuild()) is ExitCode.OK
    assert len(searched) == (stored != "kept")
    assert errors(tmp_path) == BAD
    assert pq.read_table(kept)["row_id"].to_pylist() == sorted(BAD)


def test_ids_of_filtered_rows_are_ignored(tmp_path: Path) -> None:
    spec = with_bad_ids(tmp_path, input={"filter": "prompt not in ('number 4', 'number 7')"})
    assert run_job(spec, build=FakeBuild()) is ExitCode.TOO_MANY_ROW_ERRORS
    assert errors(tmp_path) == {
        33: ("duplicate_id", 'input.id_column: row 11 has the same value in "id"')
    }
