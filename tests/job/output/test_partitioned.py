from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.errors import DataError, ExitCode, LockedError, UsageError
from batchinfer.job.input.dataset import open_source
from batchinfer.job.input.hive_partitions import folder_values
from batchinfer.job.output import partitioned
from batchinfer.job.output.open import output_at
from batchinfer.job.output.verify import verify
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from tests.job.datasets import rot, write_parquet
from tests.job.fakes import FakeBuild, job
from tests.job.output.test_resume import Model

LANGS = ["de", None, "a/b=c%", "ü", ""]


def partitioned_job(tmp_path: Path, *by: str, **columns: Any) -> JobSpec:
    """Return a job of 25 rows in parts of 10."""
    rows = {"prompt": [f"{at} says" for at in range(25)], **columns}
    write_parquet(tmp_path / "in" / "x.parquet", rows)
    return job(tmp_path, output={"partition_by": list(by)})


def with_langs(tmp_path: Path, *by: str) -> JobSpec:
    days = [date(2026, 1, 1 + at // 13) for at in range(25)]
    return partitioned_job(tmp_path, *by, lang=[LANGS[at % 5] for at in range(25)], day=days)


def files(tmp_path: Path) -> dict[str, bytes]:
    folder = tmp_path / "out" / "partitioned"
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*.parquet"))
    }


def run(spec: JobSpec, **options: Any) -> ExitCode:
    return run_job(spec, build=FakeBuild(), quiet=True, **options)


def test_partition_by_writes_hive_folders(tmp_path: Path) -> None:
    spec = with_langs(tmp_path, "lang", "day")
    assert run(spec) is ExitCode.OK
    found = open_source(str(tmp_path / "out" / "partitioned"))
    rows = [
        row
        for _, batch in found.scan(["row_id", "lang", "day", "prompt"], [found.rows_there])
        for row in batch.to_pylist()
    ]
    assert sorted(row["row_id"] for row in rows) == list(range(25))
    for row in rows:
        at = row["row_id"]
        assert (row["lang"], row["day"]) == (LANGS[at % 5], str(date(2026, 1, 1 + at // 13)))
        assert row["prompt"] == f"{at} says"
    seen = duckdb.sql(
        f"select lang, day, row_id from read_parquet('{tmp_path}/out/partitioned/*/*/*.parquet', "
        "hive_partitioning = true)"
    ).fetchall()
    assert {(lang, row) for lang, _, row in seen if lang} == {
        (LANGS[at % 5], at) for at in range(25) if LANGS[at % 5]
    }
    one = pq.read_table(
        tmp_path / "out" / "partitioned" / "lang=de" / "day=2026-01-01" / "part-00000.parquet",
        partitioning=None,
    )
    assert one["row_id"].to_pylist() == [0, 5], "rows are in input order"
    assert not {"lang", "day"} & set(one.schema.names)
    assert b"batchinfer.fingerprint" in one.schema.metadata
    assert sorted((tmp_path / "out" / "data").iterdir())


def test_damaged_partitioned_file_is_found_and_written_again(tmp_path: Path) -> None:
    spec = with_langs(tmp_path, "lang")
    assert run(spec) is ExitCode.OK
    before = files(tmp_path)
    times = [p.stat().st_mtime_ns for p in (tmp_path / "out" / "partitioned").rglob("*")]
    assert run(spec) is ExitCode.OK
    assert times == [p.stat().st_mtime_ns for p in (tmp_path / "out" / "partitioned").rglob("*")]
    out = output_at(spec.output.path)
    assert verify(out).problems == []
    damaged = tmp_path / "out" / "partitioned" / "lang=de" / "part-00000.parquet"
    rot(damaged)
    assert [str(damaged) in problem for problem in verify(out).problems] == [True]
    damaged.unlink()
    assert [str(damaged) in problem for problem in verify(out).problems] == [True]
    assert run(spec) is ExitCode.OK
    assert files(tmp_path) == before


def test_changed_partition_columns_run_no_rows(tmp_path: Path) -> None:
    spec = with_langs(tmp_path)
    assert run(spec) is ExitCode.OK
    assert not (tmp_path / "out" / "partitioned").exists()

    def again(*by: str) -> set[str]:
        output = spec.output.model_copy(update={"partition_by": by})
        build = FakeBuild()
        changed = spec.model_copy(update={"output": output})
        assert run_job(changed, build=build, quiet=True) is ExitCode.OK
        assert build.count == 0
        return {Path(name).parts[0].partition("=")[0] for name in files(tmp_path)}

    assert again("lang") == {"lang"}
    assert again("status", "day") == {"status"}
    assert again() == set()
    assert verify(output_at(spec.output.path)).problems == []


def test_interrupted_partitioning_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = with_langs(tmp_path, "lang")
    assert run(spec) is ExitCode.OK
    expected = files(tmp_path)
    whole = partitioned.parquet_bytes
    for at in (0, 4):
        (tmp_path / "out" / "partitioned" / "lang=de" / "part-00001.parquet").unlink()
        steps = iter(range(100))

        def dies(tables: Any, at: int = at, steps: Any = steps) -> bytes:
            if next(steps) == at:
                raise KeyboardInterrupt
            return whole(tables)

        monkeypatch.setattr(partitioned, "parquet_bytes", dies)
        (tmp_path / "out" / "_SUCCESS").unlink()
        with pytest.raises(KeyboardInterrupt):
            run(spec)
        assert verify(output_at(spec.output.path)).problems == []
        monkeypatch.setattr(partitioned, "parquet_bytes", whole)
        assert run(spec) is ExitCode.OK
        assert files(tmp_path) == expected


@pytest.mark.parametrize(
    ("by", "columns", "error", "message"),
    [
        (["nope"], {}, UsageError, '"nope" is neither a kept input column'),
        (["generated_text"], {}, UsageError, "is neither a kept input column nor status"),
        (["x"], {"x": [[1]] * 25}, DataError, 'column "x" is list'),
        (["x"], {"x": [0.5] * 25}, DataError, 'column "x" is double'),
        (["x"], {"x": range(25)}, DataError, "would make 25 partitions; at most 20 are allowed"),
        (["x"], {"x": ["y" * 300] * 25}, DataError, 'a value of "x" is too long'),
    ],
)
def test_invalid_partition_columns_are_refused_before_the_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    by: list[str],
    columns: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.setattr(partitioned, "MOST_PARTITIONS", 20)
    build = FakeBuild()
    with pytest.raises(error, match=message):
        run_job(partitioned_job(tmp_path, *by, **columns), build=build, quiet=True)
    assert build.count == 0


def test_foreign_partitioned_folder_is_kept(tmp_path: Path) -> None:
    spec = with_langs(tmp_path)
    assert run(spec) is ExitCode.OK
    mine = tmp_path / "out" / "partitioned" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    output = spec.output.model_copy(update={"partition_by": ("lang",)})
    with pytest.raises(LockedError, match="was not written by batchinfer"):
        run(spec.model_copy(update={"output": output}))
    assert run(spec, overwrite=True) is ExitCode.OK
    assert mine.read_text() == "mine"


def test_retried_rows_move_to_their_new_partition(tmp_path: Path) -> None:
    spec = with_langs(tmp_path, "status")
    assert run_job(spec, build=Model(3, 17), quiet=True) is ExitCode.TOO_MANY_ROW_ERRORS
    assert {name.partition("/")[0] for name in files(tmp_path)} == {"status=ok", "status=error"}
    assert run_job(spec, build=Model(), retry_errors=True, quiet=True) is ExitCode.OK
    assert {name.partition("/")[0] for name in files(tmp_path)} == {"status=ok"}


def test_partition_columns_added_later_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = partitioned_job(tmp_path, x=range(25))
    assert run(spec) is ExitCode.OK
    monkeypatch.setattr(partitioned, "MOST_PARTITIONS", 20)
    output = spec.output.model_copy(update={"partition_by": ("x",)})
    for _ in range(2):
        with pytest.raises(DataError, match="would make 25 partitions; at most 20 are allowed"):
            run(spec.model_copy(update={"output": output}))
    assert not files(tmp_path)
    assert run(spec) is ExitCode.OK, "the finished parts are unchanged"


@given(st.none() | st.text(max_size=9), st.text(min_size=1, max_size=5))
def test_partition_folder_names_round_trip(value: str | None, column: str) -> None:
    name = partitioned._folder_name(column, value)
    assert "/" not in name
    assert "\0" not in name
    assert folder_values(["/lake"], [f"/lake/{name}/x"]) == {f"/lake/{name}/x": {column: value}}


def test_hive_null_marker_is_refused_as_a_value(tmp_path: Path) -> None:
    """pyarrow and polars read it as null, even if it is percent-encoded."""
    spec = partitioned_job(tmp_path, "x", x=["a", None, *["__HIVE_DEFAULT_PARTITION__"] * 23])
    with pytest.raises(DataError, match="has the value __HIVE_DEFAULT_PARTITION__, which readers"):
        run(spec)
    assert not files(tmp_path)


def test_partition_values_of_all_string_types() -> None:
    texts = pa.array(["a", None])
    for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())):
        assert partitioned._values_of([texts.cast(kind)]) == [("a",), (None,)]
