from __future__ import annotations

import json
import sys
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import DataError, ExitCode, UsageError
from batchinfer.job.claims import swap_generation
from batchinfer.job.input.dataset import Source, open_source
from batchinfer.job.run.run_job import run_job
from tests.job.fakes import FakeBuild, TellingBuild, job
from tests.job.output.test_resume import stop_at

deltalake = pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")
pytest.importorskip("sqlalchemy")


def kept(found: Source, *columns: str) -> list[Any]:
    batches = found.scan(columns, [found.rows_there])
    rows = [tuple(row.values()) for _, batch in batches for row in batch.to_pylist()]
    return [row[0] for row in rows] if len(columns) == 1 else rows


def delta(folder: Path, **columns: Any) -> str:
    """Write a Delta table, partitioned by two columns, in two commits; the second adds a column."""
    first = {"prompt": ["a", "b"], "lang": ["d e/%", None], "day": [date(2026, 1, 1)] * 2}
    options: dict[str, Any] = {"partition_by": ["lang", "day"]}
    deltalake.write_deltalake(folder, pa.table(first), **options)
    second = {"prompt": ["c"], "lang": ["en"], "day": [date(2026, 1, 2)], "n": [1.5]}
    deltalake.write_deltalake(folder, pa.table(second), mode="append", schema_mode="merge")
    return str(folder)


def test_a_delta_table_is_read_at_its_latest_and_at_an_earlier_version(tmp_path: Path) -> None:
    path = delta(tmp_path / "t")
    found = open_source(path)
    assert (found.version, found.num_rows) == (1, 3)
    assert found.schema == pa.schema(
        [("prompt", pa.string()), ("n", pa.float64()), ("lang", pa.string()), ("day", pa.date32())]
    )
    rows = sorted(kept(found, "prompt", "lang", "day", "n"))
    assert rows == [
        ("a", "d e/%", date(2026, 1, 1), None),
        ("b", None, date(2026, 1, 1), None),
        ("c", "en", date(2026, 1, 2), 1.5),
    ]
    assert kept(found, "prompt")[2] == "c", "added rows come last"
    before = open_source(path, version=0)
    assert (before.version, sorted(kept(before, "prompt"))) == (0, ["a", "b"])
    assert "n" not in before.schema.names
    chosen = open_source(path, format_name="delta", condition="day = date '2026-01-02'")
    assert kept(chosen, "prompt") == ["c"]


def test_removed_files_are_not_read(tmp_path: Path) -> None:
    path = str(tmp_path)
    for text in ("old", "new"):
        deltalake.write_deltalake(path, pa.table({"prompt": [text]}), mode="overwrite")
    assert kept(open_source(path), "prompt") == ["new"]
    assert sorted(kept(open_source(path, format_name="parquet"), "prompt")) == ["new", "old"]


def delta_log(folder: Path, protocol: dict[str, Any], configuration: Any, **add: Any) -> str:
    """Write a Delta table of one file with a handmade log."""
    (folder / "_delta_log").mkdir(parents=True)
    pq.write_table(pa.table({"prompt": ["a", "b"]}), folder / "x.parquet")
    field = {"name": "prompt", "type": "string", "nullable": True, "metadata": {}}
    field["metadata"] = {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "prompt"}
    metadata = {
        "id": "1",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": [field]}),
        "partitionColumns": [],
        "configuration": configuration,
        "createdTime": 1,
    }
    size = (folder / "x.parquet").stat().st_size
    file = {"path": "x.parquet", "partitionValues": {}, "size": size, "modificationTime": 1}
    actions = [
        {"protocol": protocol},
        {"metaData": metadata},
        {"add": {**file, "dataChange": True, **add}},
    ]
    log = folder / "_delta_log" / "00000000000000000000.json"
    log.write_text("\n".join(map(json.dumps, actions)))
    return str(folder)


def test_tables_with_deletion_vectors_are_refused(tmp_path: Path) -> None:
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, **features}
    enabled = {"delta.enableDeletionVectors": "true"}
    assert kept(open_source(delta_log(tmp_path / "none", protocol, enabled)), "prompt") == [
        "a",
        "b",
    ]
    vector = {"storageType": "u", "pathOrInlineDv": "vBn[lx{q8@P<9BNH/isA", "offset": 1}
    vector |= {"sizeInBytes": 36, "cardinality": 1}
    path = delta_log(tmp_path / "some", protocol, enabled, deletionVector=vector)
    with pytest.raises(DataError, match=r"deleted rows that are still in its files.*\n.*PURGE"):
        open_source(path)


def test_mapped_columns_are_refused(tmp_path: Path) -> None:
    protocol = {"minReaderVersion": 2, "minWriterVersion": 5}
    path = delta_log(tmp_path / "t", protocol, {"delta.columnMapping.mode": "name"})
    with pytest.raises(DataError, match=r"columnMapping\.mode"):
        open_source(path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"version": 9}, DataError, r"cannot be read as a table \(delta\): .*9"),
        ({"version": 0, "format_name": "parquet"}, UsageError, "only tables .* have versions"),
        ({"format_name": "iceberg"}, DataError, r"cannot be read as a table \(iceberg\)"),
    ],
)
def test_tables_that_cannot_be_read_are_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = delta(tmp_path)
    with pytest.raises(error, match=message):
        open_source(path, **options)


def test_a_table_is_the_only_path(tmp_path: Path) -> None:
    path = delta(tmp_path / "t")
    with pytest.raises(UsageError, match="must be the only path"):
        open_source([path, f"{path}/lang=en"])


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = delta(tmp_path)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    monkeypatch.delitem(sys.modules, "batchinfer.job.input.formats.delta", raising=False)
    with pytest.raises(
        UsageError, match=r"delta extra is not installed\npip install '\.\[delta\]'"
    ):
        open_source(path)


def stopped_on_a_table(tmp_path: Path, step: int) -> None:
    """Stop a job on a table at a step, then append another version to the table."""
    table = tmp_path / "in"
    deltalake.write_deltalake(table, pa.table({"prompt": [f"row {at}" for at in range(30)]}))
    breaks = FakeBuild(max_num_seqs=4)

    def stop(at: int) -> None:
        if at == step:
            raise KeyboardInterrupt

    breaks.before_step = stop
    with pytest.raises(KeyboardInterrupt):
        run_job(job(tmp_path), build=breaks)
    deltalake.write_deltalake(table, pa.table({"prompt": ["later"]}), mode="append")


def prompts_of(tmp_path: Path) -> list[str]:
    table = pq.read_table(sorted((tmp_path / "out" / "data").iterdir()))
    return table["prompt"].to_pylist()  # type: ignore[no-any-return]


def test_a_resumed_job_keeps_the_version_of_a_moved_table(tmp_path: Path) -> None:
    stopped_on_a_table(tmp_path, step=15)
    (tmp_path / "in").rename(tmp_path / "moved")
    spec = job(tmp_path, input={"path": str(tmp_path / "moved")})
    assert run_job(spec, build=FakeBuild()) is ExitCode.OK
    assert prompts_of(tmp_path) == [f"row {at}" for at in range(30)]
    (tmp_path / "moved").rename(tmp_path / "in")
    with pytest.raises(DataError, match="the input has changed"):
        run_job(job(tmp_path), build=FakeBuild())


def test_another_table_is_read_at_its_latest_version(tmp_path: Path) -> None:
    stopped_on_a_table(tmp_path, step=0)
    other = job(tmp_path, input={"path": str(tmp_path / "other")})
    for text in ("first", "second"):
        rows = pa.table({"prompt": [text]})
        deltalake.write_deltalake(tmp_path / "other", rows, mode="overwrite")
    assert run_job(other, build=FakeBuild()) is ExitCode.OK
    assert prompts_of(tmp_path) == ["second"]


def test_an_interrupted_swap_ends_at_the_new_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, spec = tmp_path / "in", job(tmp_path)
    deltalake.write_deltalake(table, pa.table({"prompt": ["first"]}))
    assert run_job(spec, build=FakeBuild()) is ExitCode.OK
    deltalake.write_deltalake(table, pa.table({"prompt": ["second"]}), mode="overwrite")

    def cut_off(name: str) -> None:
        if name == "swap-hidden":
            raise KeyboardInterrupt

    monkeypatch.setattr(swap_generation, "failpoint", cut_off)
    with pytest.raises(KeyboardInterrupt):
        run_job(spec, build=FakeBuild(), update=True)
    monkeypatch.undo()
    assert run_job(spec, build=FakeBuild()) is ExitCode.OK
    assert prompts_of(tmp_path) == ["second"]


def test_an_interrupted_update_resumes_at_its_version(tmp_path: Path) -> None:
    """The job is unfinished when its update starts. Then the table gets yet another version."""
    stopped_on_a_table(tmp_path, step=15)
    breaks = TellingBuild(max_num_seqs=4)
    breaks.before_step = stop_at(3)
    assert run_job(job(tmp_path), build=breaks, update=True) is ExitCode.INTERRUPTED
    deltalake.write_deltalake(tmp_path / "in", pa.table({"prompt": ["last"]}), mode="append")
    assert run_job(job(tmp_path), build=FakeBuild()) is ExitCode.OK
    assert prompts_of(tmp_path) == [*(f"row {at}" for at in range(30)), "later"]
    assert run_job(job(tmp_path), build=FakeBuild(), update=True) is ExitCode.OK
    assert prompts_of(tmp_path)[-1] == "last"


def test_retry_errors_skips_rows_added_since(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, spec = tmp_path / "in", job(tmp_path)
    deltalake.write_deltalake(table, pa.table({"prompt": ["first", ""]}))
    assert run_job(spec, build=FakeBuild()) is ExitCode.TOO_MANY_ROW_ERRORS
    deltalake.write_deltalake(table, pa.table({"prompt": ["later"]}), mode="append")
    options = {"build": FakeBuild(), "retry_errors": True}
    assert run_job(spec, **options) is ExitCode.TOO_MANY_ROW_ERRORS
    assert prompts_of(tmp_path) == ["first", ""]
    assert (
        "failed rows are retried at version 0 of the table; to read version"
        in capsys.readouterr().err
    )
    corrected = pa.table({"prompt": ["first", "corrected"]})
    deltalake.write_deltalake(table, corrected, mode="overwrite")
    assert run_job(spec, **options) is ExitCode.OK
    assert prompts_of(tmp_path) == ["first", "corrected"]


@pytest.fixture
def iceberg(tmp_path: Path) -> Any:
    """Return an Iceberg table with two snapshots; the second adds a column."""
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.types import DoubleType

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        url = f"sqlite:///{tmp_path}/catalog.db"
        catalog = SqlCatalog("c", uri=url, warehouse=f"file://{tmp_path}/w")
        catalog.create_namespace("db")
        rows = pa.table({"prompt": ["a", "b"], "n": pa.array([1, 2], pa.int32())})
        made = catalog.create_table("db.t", schema=rows.schema)
        made.append(rows)
        with made.update_schema() as update:
            update.add_column("extra", DoubleType())
        more = {"prompt": ["c"], "n": pa.array([3], pa.int32()), "extra": [0.5]}
        made.append(pa.table(more))
    yield made
    catalog.close()


def test_an_iceberg_table_is_read_at_its_latest_and_at_an_earlier_snapshot(
    tmp_path: Path, iceberg: Any
) -> None:
    folder = str(tmp_path / "w" / "db" / "t")
    for path in (folder, iceberg.metadata_location.removeprefix("file://")):
        found = open_source(path)
        assert found.version == iceberg.current_snapshot().snapshot_id
        assert kept(found, "prompt", "n", "extra") == [
            ("a", 1, None),
            ("b", 2, None),
            ("c", 3, 0.5),
        ]
    first = iceberg.history()[0].snapshot_id
    assert kept(open_source(folder, version=first), "prompt") == ["a", "b"]
    with pytest.raises(DataError, match=r"no such snapshot"):
        open_source(folder, version=5)


def test_renamed_columns_are_refused(tmp_path: Path, iceberg: Any) -> None:
    with iceberg.update_schema() as update:
        update.rename_column("prompt", "text")
    with pytest.raises(
        DataError, match=r'was written before column "text" of the table was renamed'
    ):
        open_source(str(tmp_path / "w" / "db" / "t"))
