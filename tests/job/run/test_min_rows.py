"""``errors.min_rows``: a job with fewer good rows than it needs does not succeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from tests.job.fakes import FakeBuild, job

ENDED, FAILED = ExitCode.OK, ExitCode.TOO_MANY_ROW_ERRORS


def small_job(tmp_path: Path, **sections: dict[str, Any]) -> JobSpec:
    """Return a job of four rows; one of them fails."""
    folder = tmp_path / "in"
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"prompt": ["aa", "b", "ab", ""]}), folder / "x.parquet")
    errors = {"max_error_rate": 1.0, **sections.pop("errors", {})}
    return job(tmp_path, errors=errors, **sections)


@pytest.mark.parametrize(
    ("least", "sections", "code"),
    [
        (3, {}, ENDED),
        (4, {}, FAILED),
        (0, {"input": {"filter": "prompt = 'none'"}}, ENDED),
        (1, {"input": {"filter": "prompt = 'none'"}}, FAILED),
        (2, {"accept": {"regex": "a", "max_tries": 1}}, ENDED),
        (3, {"accept": {"regex": "a", "max_tries": 1}}, FAILED),
    ],
)
def test_min_rows(tmp_path: Path, least: int, sections: dict[str, Any], code: ExitCode) -> None:
    spec = small_job(tmp_path, errors={"min_rows": least}, **sections)
    assert [run_job(spec, build=FakeBuild(), quiet=True) for _ in range(2)] == [code, code]
    assert (tmp_path / "out" / "_SUCCESS").exists() is (code is ENDED)


def test_min_rows_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_job(small_job(tmp_path, errors={"min_rows": 9}), build=FakeBuild(), quiet=True)
    assert "3 rows succeeded, but errors.min_rows is 9\n" in capsys.readouterr().err
    spec = small_job(tmp_path, errors={"min_rows": 3})
    assert run_job(spec, build=FakeBuild(), quiet=True) is ENDED


def test_accept_that_keeps_no_sample_is_warned_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = small_job(tmp_path, accept={"regex": "z", "max_tries": 1})
    assert run_job(spec, build=FakeBuild()) is ENDED
    assert "accept kept no sample of any row" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.jsonl", ""),
        ("x.jsonl", "\n \n"),
        ("x.json", "[]"),
        ("x.json", ""),
        ("x.csv", "prompt,key,day,size\n"),
    ],
)
@pytest.mark.parametrize(("least", "code"), [(None, ENDED), (1, FAILED)])
def test_text_files_without_rows(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    least: int | None,
    code: ExitCode,
) -> None:
    """JSON without rows names no columns, so the job's columns cannot be checked."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text(text)
    spec = job(
        tmp_path,
        input={"id_column": "key", "filter": "size > 5", "keep_columns": ["key", "day", "prompt"]},
        output={"rename": {"prompt": "question"}, "partition_by": ["day"]},
        errors={"min_rows": least},
    )
    assert run_job(spec, build=FakeBuild()) is code
    assert "no rows" in capsys.readouterr().err
    output = pq.read_schema(tmp_path / "out" / "data" / "part-00000.parquet")
    assert {"key", "day", "question", "generated_text"} < set(output.names)


def test_rows_that_arrive_after_an_empty_run_are_computed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.jsonl").write_text("")
    assert run_job(job(tmp_path), build=FakeBuild(), quiet=True) is ENDED
    (tmp_path / "in" / "x.jsonl").write_text('{"prompt": "ab", "n": 1}\n')
    assert run_job(job(tmp_path), build=FakeBuild(), quiet=True, update=True) is ENDED
    rows = pq.read_table(tmp_path / "out" / "data" / "part-00000.parquet")
    assert rows["n"].to_pylist() == [1]
