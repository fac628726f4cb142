"""Parquet files by other programs are read, and their values are stored next to the answers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.verify import verify
from batchinfer.job.run.run_job import run_job
from tests.job.fakes import FakeBuild, job

NUM_ROWS = 57
TEXTS = ["naïve café", "日本語の文章", "🙂 emoji", "plain", "a\nb", 'quo"ted', "tab\there"]


def columns() -> dict[str, list[Any]]:
    """Return columns of many types; most of them contain nulls."""
    rows = range(NUM_ROWS)
    return {
        "prompt": [f"{row} {TEXTS[row % 7]}" for row in rows],
        "kind": [None if row % 11 == 0 else TEXTS[row % 3] for row in rows],
        "n": [None if row % 5 == 0 else row for row in rows],
        "score": [row / 7 for row in rows],
        "flag": [None if row % 4 == 0 else row % 3 == 0 for row in rows],
        "day": [date(2026, 1, 1 + row % 28) for row in rows],
        "at": [datetime(2026, 1, 1, row % 24, tzinfo=UTC) for row in rows],
        "price": [Decimal(row) / 100 for row in rows],
        "raw": [bytes([row, 255]) for row in rows],
        "ids": [None if row % 6 == 0 else list(range(row % 4)) for row in rows],
        "messages": [[{"role": "user", "content": TEXTS[row % 7]}] * (row % 3) for row in rows],
        "meta": [{"a": row, "b": None if row % 2 else "x"} for row in rows],
    }


def by_polars(path: Path, **options: Any) -> None:
    frame = pl.DataFrame(columns(), schema_overrides={"price": pl.Decimal(9, 2)})
    frame.with_columns(pl.col("kind").cast(pl.Categorical)).write_parquet(path, **options)


def by_duckdb(path: Path, options: str) -> None:
    table = pa.table(columns())  # duckdb finds the table by the name of this variable
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("found", table)
        connection.execute(f"COPY (SELECT * FROM found) TO '{path}' (FORMAT parquet{options})")


def by_duckdb_with_enums(path: Path) -> None:
    with duckdb.connect() as connection:
        connection.register("found", pa.table(columns()))
        kinds = ", ".join(f"'{text}'" for text in TEXTS[:3])
        connection.execute(f"CREATE TYPE kinds AS ENUM ({kinds})")
        select = "SELECT * REPLACE (kind::kinds AS kind) FROM found"
        connection.execute(f"COPY ({select}) TO '{path}' (FORMAT parquet)")


WRITERS: dict[str, Callable[[Path], None]] = {
    "polars": by_polars,
    "polars, small groups": lambda path: by_polars(path, row_group_size=10, data_page_size=64),
    "polars, snappy": lambda path: by_polars(path, compression="snappy", statistics=False),
    "polars by pyarrow": lambda path: by_polars(path, use_pyarrow=True),
    "duckdb": lambda path: by_duckdb(path, ""),
    "duckdb, version 2": lambda path: by_duckdb(path, ", PARQUET_VERSION V2, COMPRESSION zstd"),
    "duckdb, enums": by_duckdb_with_enums,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_values_of_other_writers_come_back(tmp_path: Path, writer: str) -> None:
    given = tmp_path / "in" / "x.parquet"
    given.parent.mkdir()
    WRITERS[writer](given)
    assert run_job(job(tmp_path), build=FakeBuild(), quiet=True) is ExitCode.OK
    out = OutputDir(tmp_path / "out")
    table = pa.concat_tables(pq.read_table(path) for path in out.files.entries(out.data))
    expected = pq.read_table(given)
    for name in columns():
        assert table[name].to_pylist() == expected[name].to_pylist(), name
        assert table.schema.field(name).type == expected.schema.field(name).type, name
    prompts = [text.encode() for text in columns()["prompt"]]
    answers = [text[:8].decode(errors="replace") for text in prompts]
    assert table["generated_text"].to_pylist() == answers
    assert verify(out).problems == []
    found = pl.read_parquet(sorted((tmp_path / "out" / "data").iterdir()))
    assert found["row_id"].to_list() == list(range(NUM_ROWS))
    [count] = duckdb.sql(f"SELECT count(*), sum(n) FROM '{tmp_path}/out/data/*.parquet'").fetchall()
    assert count == (NUM_ROWS, sum(n for n in columns()["n"] if n is not None))
