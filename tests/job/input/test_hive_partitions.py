"""Columns from key=value folders, next to the columns of the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import DataError, ExitCode
from batchinfer.job.input.dataset import open_source
from batchinfer.job.run.run_job import run_job
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Write two rows for each pair of two languages and two years."""
    for lang in ("de", "en"):
        for year in (2025, 2026):
            prompts = [f"{lang} {year} {at}" for at in range(2)]
            write_parquet(
                tmp_path / "in" / f"lang={lang}" / f"year={year}" / "x.parquet", {"prompt": prompts}
            )
    return tmp_path / "in"


def rows(path: Path | str, *columns: str) -> list[dict[str, Any]]:
    source = open_source(str(path))
    names, whole = list(columns or source.schema.names), [range(source.num_rows)]
    found = [row for _, batch in source.scan(names, whole) for row in batch.to_pylist()]
    assert [row for _, piece in source.rows(["prompt"], whole) for row in piece]
    return found


def test_folder_columns_equal_those_of_polars(lake: Path) -> None:
    expected = pl.read_parquet(lake / "**/*.parquet", hive_partitioning=True).to_dicts()
    assert rows(lake) == expected
    schema = open_source(str(lake)).schema
    assert schema.types[1:] == [pa.string(), pa.int64()]


def test_folder_columns_are_read_in_any_order(lake: Path) -> None:
    assert rows(lake, "year", "prompt")[0] == {"year": 2025, "prompt": "de 2025 0"}
    assert rows(lake, "year") == [{"year": year} for year in (2025, 2025, 2026, 2026) * 2]


def test_folders_in_the_path_itself_are_not_columns(lake: Path) -> None:
    assert open_source(str(lake / "lang=de")).schema.names == ["prompt", "year"]
    assert open_source(f"{lake}/lang=de/*/x.parquet").schema.names == ["prompt", "year"]
    assert open_source(str(lake / "lang=de" / "year=2025" / "x.parquet")).schema.names == ["prompt"]


@pytest.mark.parametrize("name", ["a[*]b", "a[?]b/lang=de", "a[ab]*"])
def test_an_existing_folder_is_not_a_glob(tmp_path: Path, name: str) -> None:
    write_parquet(tmp_path / name / "k=a" / "x.parquet", {"prompt": ["p"]})
    assert rows(tmp_path / name) == [{"prompt": "p", "k": "a"}]
    assert rows(tmp_path / name / "k=a" / "x.parquet") == [{"prompt": "p"}]


def test_a_column_of_the_files_is_read_from_them(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "k=a" / "x.parquet", {"prompt": ["p"], "k": ["own"]})
    assert rows(tmp_path / "in") == [{"prompt": "p", "k": "own"}]


def test_nulls_escapes_and_numbers_that_are_texts(tmp_path: Path) -> None:
    for at, folder in enumerate(("k=__HIVE_DEFAULT_PARTITION__/n=01", "k=a%2Fb%20c/n=2")):
        write_parquet(tmp_path / "in" / folder / "x.parquet", {"prompt": [str(at)]})
    assert rows(tmp_path / "in") == [
        {"prompt": "0", "k": None, "n": "01"},
        {"prompt": "1", "k": "a/b c", "n": "2"},
    ]


def test_folders_with_different_keys_are_refused(lake: Path) -> None:
    write_parquet(lake / "lang=fr" / "x.parquet", {"prompt": ["p"]})
    with pytest.raises(DataError, match=r"with different keys"):
        open_source(str(lake))


def test_folder_columns_of_json_lines_files(tmp_path: Path) -> None:
    for lang in ("de", "en"):
        path = tmp_path / "in" / f"lang={lang}" / "x.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"prompt": lang}) + "\nhalf\n")
    assert rows(tmp_path / "in", "lang") == [{"lang": lang} for lang in ("de", "de", "en", "en")]


def test_a_file_without_a_column_gets_it_from_its_folder(tmp_path: Path) -> None:
    for k, row in ((1, {"prompt": "a", "k": 7}), (2, {"prompt": "b"})):
        (tmp_path / f"k={k}").mkdir()
        (tmp_path / f"k={k}" / "x.jsonl").write_text(json.dumps(row))
    assert [row["k"] for row in rows(tmp_path)] == [7, 2]
    assert rows(tmp_path, "k") == [{"k": 7}, {"k": 2}]
    (tmp_path / "k=2").rename(tmp_path / "k=x")
    with pytest.raises(DataError, match=r"k=x/x\.jsonl: the folder name says k=x, .* int64"):
        open_source(str(tmp_path))


def test_folder_with_a_time_outside_python_range_is_a_data_error(tmp_path: Path) -> None:
    at = pa.array([1], pa.timestamp("ns"))
    write_parquet(tmp_path / "at=1" / "x.parquet", {"prompt": ["a"], "at": at})
    folder = "at=2020-01-01 00:00:00.000000001"
    write_parquet(tmp_path / folder / "x.parquet", {"prompt": ["b"]})
    with pytest.raises(DataError, match=r"the folder name says at=2020.* has type timestamp\[ns\]"):
        open_source(str(tmp_path), mode="union")


def test_job_uses_and_keeps_folder_columns(lake: Path, tmp_path: Path) -> None:
    spec = job(tmp_path, prompt={"column": None, "template": "{{ year }} {{ prompt }}"})
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    found = pq.read_table(tmp_path / "out" / "data" / "part-00000.parquet").to_pylist()
    assert [row["generated_text"] for row in found[:3]] == ["2025 de ", "2025 de ", "2026 de "]
    assert (found[0]["lang"], found[0]["year"]) == ("de", 2025)
