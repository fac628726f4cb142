"""Example rows of a report, and its charts as separate pictures."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.run.run_job import run_job
from batchinfer.report.from_output import MOST_CHARACTERS, from_output
from docs.make_pictures import main as make_pictures
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return the output of a job of five parts, with long prompts and other columns."""
    prompts = [f"{row} " + "x" * 100 for row in range(50)]
    talks = [[{"role": "user", "content": "hello"}]] * 50
    columns = {"prompt": prompts, "long": ["y" * 9999] * 50, "talk": talks, "n": range(50)}
    write_parquet(tmp_path / "in" / "x.parquet", columns)
    spec = job(tmp_path, sampling={"n": 2})
    run_job(spec, build=FakeBuild(), quiet=True)
    return tmp_path / "out"


def test_example_rows_come_from_several_parts(out: Path) -> None:
    examples = from_output(OutputDir(out), time.time()).examples
    assert [example.row_id for example in examples] == [0, 10, 20, 30]
    first = examples[0]
    assert [name for name, _ in first.inputs] == ["prompt", "long", "talk", "n"]
    assert len(dict(first.inputs)["long"]) == MOST_CHARACTERS
    assert "'content': 'hello'" in dict(first.inputs)["talk"]
    assert first.answer == "0 xxxxxx"
    assert first.facts == "102 input tokens, 16 output tokens; length x2"
    assert first.error is None


def test_charts_can_be_written_as_pictures(out: Path, tmp_path: Path) -> None:
    make_pictures(str(out), str(tmp_path))
    for name in ("memory.svg", "pool.svg"):
        svg = (tmp_path / name).read_text()
        assert svg.startswith("<svg xmlns=")
        assert "<path" in svg


def test_huge_values_of_other_types_are_left_out(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "x" * (2 << 20)}]
    word = pa.array(["y" * 9999] * 2).dictionary_encode()
    columns = {"prompt": ["a", "b"], "talk": [talk, talk[:0]], "word": word}
    write_parquet(tmp_path / "in" / "x.parquet", columns)
    run_job(job(tmp_path), build=FakeBuild(), quiet=True)
    huge, small = from_output(OutputDir(tmp_path / "out"), time.time()).examples
    assert dict(huge.inputs)["talk"] == "(2 MiB)"
    assert dict(small.inputs)["talk"] == "[]"
    assert len(dict(small.inputs)["word"]) == MOST_CHARACTERS


def test_failed_rows_are_named_by_id(tmp_path: Path) -> None:
    columns = {"prompt": ["a", "", "c"], "name": ["x", "<y>", "z"]}
    write_parquet(tmp_path / "in" / "x.parquet", columns)
    spec = job(tmp_path, input={"id_column": "name"}, errors={"max_error_rate": 1})
    run_job(spec, build=FakeBuild(), quiet=True)
    (failure,) = from_output(OutputDir(tmp_path / "out"), time.time()).failures
    assert (failure.code, failure.rows) == ("empty_prompt", 1)
    assert [row for row, _ in failure.examples] == ["row 1 (<y>)"]


def test_failed_rows_may_have_times_as_ids_that_python_lacks(tmp_path: Path) -> None:
    ids = pa.array([1, 2, None], pa.timestamp("ns"))
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["a", "", "c"], "at": ids})
    spec = job(tmp_path, input={"id_column": "at"}, errors={"max_error_rate": 1})
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    failures = from_output(OutputDir(tmp_path / "out"), time.time()).failures
    named = {failure.code: failure.examples[0][0] for failure in failures}
    assert named == {"empty_prompt": "row 1 (2)", "missing_id": "row 2"}
