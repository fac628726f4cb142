"""Input from an object store; moto's server stands in for it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.store import GCSStore

from batchinfer.errors import DataError, ExitCode, StorageError
from batchinfer.job.input.dataset import open_source
from batchinfer.job.input.discover import find_files
from batchinfer.job.run.run_job import run_job
from batchinfer.job.storage import connection
from tests.job.datasets import flip_bit, write_parquet
from tests.job.fakes import FakeBuild, job
from tests.job.stores import (
    LAKE,
    SECRET,
    complaining_server,
    mark_folder,
    point_to,
    s3_server,
    upload,
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(autouse=True)
def _connected(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    point_to(address, monkeypatch)
    yield
    connection.connect.cache_clear()


@pytest.fixture
def prompts(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """Upload ten rows in three files, next to files that are not data; return the folder's URL."""
    key = f"{zlib.crc32(request.node.name.encode())}/dt=1/"
    folder = tmp_path / "uploaded"
    for name, values in (("b", [4, 5, 6]), ("a", [0, 1, 2, 3]), ("sub/c", [7, 8, 9])):
        columns = {"x": values, "prompt": [f"row {value}" for value in values]}
        write_parquet(folder / f"{name}.parquet", columns, rows_per_group=2)
    for name in ("_SUCCESS", "_meta.parquet", ".hidden.parquet", "notes.txt", "_tmp/d.parquet"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not data")
    upload(folder, key)
    return f"{LAKE}/{key}"


def values(path: str | list[str]) -> list[int]:
    source = open_source(path)
    batches = source.scan(["x"], [range(source.num_rows)])
    return [x for _, batch in batches for x in batch.column("x").to_pylist()]


def test_store_folder_is_read_in_path_order_without_hidden_files(prompts: str) -> None:
    assert values(prompts) == values(prompts.rstrip("/")) == list(range(10))


def test_input_filter_on_store_files(prompts: str) -> None:
    source = open_source(prompts, limit=3, condition="x % 2 = 1 and prompt <> 'row 3'")
    rows = [(at, b["x"].to_pylist()) for at, b in source.scan(["x"], [source.rows_there])]
    assert rows == [(1, [1]), (5, [5]), (7, [7])]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.parquet", ["a", "b"]),
        ("*/*.parquet", ["sub/c"]),
        ("**/*.parquet", ["a", "b", "sub/c"]),
        ("**", ["a", "b", "sub/c"]),
        ("[_.a-z]*.parquet", ["a", "b"]),
        ("_m*.parquet", ["_meta"]),
        ("b.parquet", ["b"]),
    ],
)
def test_globs_and_files(prompts: str, pattern: str, names: list[str]) -> None:
    found = [file for file in find_files(prompts + pattern) if file.endswith(".parquet")]
    assert found == [f"{prompts}{name}.parquet" for name in names]


def test_list_of_input_paths_keeps_its_order(prompts: str, tmp_path: Path) -> None:
    local = write_parquet(tmp_path / "x.parquet", {"x": [99], "prompt": ["row 99"]})
    assert values([f"{prompts}sub/", str(local), f"{prompts}a.parquet"]) == [
        7,
        8,
        9,
        99,
        0,
        1,
        2,
        3,
    ]


def test_job_reads_a_store_and_writes_no_secrets(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = job(tmp_path, input={"path": prompts})
    assert run_job(spec, build=FakeBuild()) is ExitCode.OK
    assert run_job(spec, build=FakeBuild()) is ExitCode.OK, "nothing to do"
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in "".join(capsys.readouterr())


def test_changed_object_is_a_changed_input(prompts: str, tmp_path: Path) -> None:
    spec = job(tmp_path, input={"path": prompts})
    run_job(spec, build=FakeBuild(), quiet=True)
    write_parquet(tmp_path / "again" / "a.parquet", {"x": [0], "prompt": ["row 9"]})
    upload(tmp_path / "again", prompts.removeprefix(f"{LAKE}/"))
    with pytest.raises(DataError, match=r"has changed.*a\.parquet has different content"):
        run_job(spec, build=FakeBuild(), quiet=True)


def test_damaged_object_error_names_the_row_group(prompts: str, tmp_path: Path) -> None:
    flip_bit(write_parquet(tmp_path / "bad" / "d.parquet", {"x": [1, 2]}), 40)
    upload(tmp_path / "bad", prompts.removeprefix(f"{LAKE}/"))
    with pytest.raises(DataError, match=rf"{prompts}d\.parquet: row group 0 cannot be read"):
        values(f"{prompts}d.parquet")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (f"{LAKE}/nothing/", "does not exist"),
        (f"{LAKE}/nothing.parquet", "does not exist"),
        (f"{LAKE}/nothing/*.parquet", "does not exist"),
        ("s3://no-such-bucket/x", "no-such-bucket.*no such bucket"),
    ],
)
def test_missing_store_input_is_a_data_error(entry: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        find_files(entry)
    assert entry in str(caught.value)


def test_store_folder_without_data_files(prompts: str) -> None:
    with pytest.raises(DataError, match="contains no data files"):
        find_files(f"{prompts}_tmp/*.txt")


def test_folder_placeholder_object_is_not_data(prompts: str, address: str) -> None:
    key = prompts.removeprefix(f"{LAKE}/")
    for folder in (key, f"{key}sub/", f"{key}empty/"):
        mark_folder(address, folder)
    assert values(prompts) == values(prompts.rstrip("/")) == list(range(10))
    assert values(f"{prompts}[se]*") == [7, 8, 9]
    with pytest.raises(DataError, match="contains no data files"):
        find_files(f"{prompts}empty/")


def test_store_folder_may_have_a_file_name(prompts: str, address: str, tmp_path: Path) -> None:
    key = prompts.removeprefix(f"{LAKE}/")
    write_parquet(tmp_path / "more" / "d.parquet" / "0.parquet", {"x": [10], "prompt": ["10"]})
    upload(tmp_path / "more", key)
    mark_folder(address, f"{key}d.parquet/")
    assert values(f"{prompts}d.parquet/") == values(f"{prompts}d.*") == [10]


@pytest.mark.parametrize(
    ("status", "error"), [(403, DataError), (500, StorageError), (503, StorageError)]
)
def test_store_that_refuses_or_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, status: int, error: type[Exception]
) -> None:
    with complaining_server(status) as address:
        point_to(address, monkeypatch)
        with pytest.raises(error, match=f"{LAKE}/x") as caught:
            open_source(f"{LAKE}/x.parquet")
    assert len(str(caught.value).splitlines()) <= 2
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("status", [403, 404])
def test_missing_store_credentials_are_named(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with complaining_server(status) as address:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", address)
        with pytest.raises(DataError, match="no credentials: AWS_ACCESS_KEY_ID and") as caught:
            open_source("s3://another-lake/x.parquet")
    assert f"status code: {status}" in str(caught.value)


def test_store_that_stops_answering_during_a_read(
    prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = open_source(prompts).scan(["x"], [range(10)])
    next(batches)
    with complaining_server(503) as address:
        point_to(address, monkeypatch)
        with pytest.raises(StorageError, match=r"cannot read .*\.parquet"):
            list(batches)


def test_object_that_changes_during_a_read(prompts: str, tmp_path: Path) -> None:
    batches = open_source(prompts).scan(["x"], [range(10)])
    next(batches)
    columns = {"x": [90, 91, 92, 93], "prompt": ["row 90", "row 91", "row 92", "row 93"]}
    write_parquet(tmp_path / "again" / "a.parquet", columns, rows_per_group=2)
    upload(tmp_path / "again", prompts.removeprefix(f"{LAKE}/"))
    with pytest.raises(DataError, match=r"a\.parquet: row group 1 .*412"):
        list(batches)


def test_google_cloud_storage_uses_the_same_reader() -> None:
    assert isinstance(connection.connect("gs://lake"), GCSStore)
