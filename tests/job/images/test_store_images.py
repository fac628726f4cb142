"""Images in object stores; moto's server stands in for a store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ExitCode, RowError
from batchinfer.job.images.changed_images import image_file_facts
from batchinfer.job.images.media_files import MediaFiles
from batchinfer.job.job import open_input
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.run.run_job import run_job
from batchinfer.job.storage import connection
from batchinfer.job.storage.filesystem import parse_json
from batchinfer.report.from_output import from_output
from tests.job.images.pictures import png
from tests.job.images.test_image_jobs import job, results
from tests.job.stores import (
    LAKE,
    Request,
    between,
    complaining_server,
    point_to,
    s3_server,
    upload,
)
from tests.vision_folders import make_vision_folder

GOOD = ("a.png", "sub/../a.png", "sub/b c#1%20.png", f"{LAKE}/in/a.png")
BAD = {
    "nothing.png": "there is no such object",
    "sub": "there is no such object",
    "../secret.png": "outside input.media_root",
    "../in": "outside input.media_root",
    "..": "outside input.media_root",
    f"{LAKE}/secret.png": "outside input.media_root",
    f"{LAKE}/in/../secret.png": "outside input.media_root",
    f"{LAKE}/in2/a.png": "outside input.media_root",
    "s3://other/in/a.png": "outside input.media_root",
    "gs://lake/in/a.png": "outside input.media_root",
    "/etc/passwd": "outside input.media_root",
    "file:///etc/passwd": "outside input.media_root",
    "http://127.0.0.1/a.png": "set input.media_urls",
    "a\0.png": "a",
    "note.txt": "unknown image format",
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(autouse=True)
def _connected(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connect to a store that has images in two folders and elsewhere."""
    point_to(address, monkeypatch)
    files = tmp_path / "uploaded"
    (files / "in" / "sub").mkdir(parents=True)
    (files / "in2").mkdir()
    (files / "in" / "note.txt").write_text("no image")
    for name in ("in/a.png", "in/sub/b c#1%20.png", "in2/a.png", "secret.png"):
        (files / name).write_bytes(png(1))
    names = [*GOOD, *BAD]
    rows = pa.table({"text": [f"Row {at}" for at in range(len(names))], "image": names})
    pq.write_table(rows, files / "in" / "rows.parquet")
    upload(files, "")
    yield
    connection.connect.cache_clear()


@pytest.mark.parametrize("place", ["input", "media_root"])
def test_rows_name_images_in_the_store(tmp_path: Path, place: str) -> None:
    """The folder is the input's, or another that ``input.media_root`` names."""
    model = make_vision_folder("llava", tmp_path / "model")
    rows = pq.read_table(tmp_path / "uploaded" / "in" / "rows.parquet")
    where = {"media_root": f"{LAKE}/in/"}
    if place == "input":
        where = {"path": f"{LAKE}/in/rows.parquet"}
    assert run_job(job(tmp_path, model, rows, input=where), quiet=True) is ExitCode.OK
    done = results(tmp_path)
    assert [row["error"] for row in done[: len(GOOD)]] == [None] * len(GOOD)
    errors = [row["error"] for row in done[len(GOOD) :]]
    assert [error and error["code"] for error in errors] == ["invalid_image"] * len(BAD)
    for error, part in zip(errors, BAD.values(), strict=True):
        assert part in error["message"]
    shown = from_output(OutputDir(tmp_path / "out"), now=0.0).examples
    assert [len(row.pictures) for row in shown] == [row.error is None for row in shown]


def test_facts_come_from_a_listing_and_change_with_the_files(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only changes of named files count, even if their sizes stay the same."""
    asked: list[str] = []
    with between(address, lambda request: asked.append(request.path)) as proxy:
        point_to(proxy, monkeypatch)
        names = ["http://host/x.png", "../secret.png", None, *GOOD, "sub/gone.png"]
        rows = pa.table({"text": ["a"] * len(names), "image": names})
        spec = job(tmp_path, Path("model"), rows, input={"media_root": f"{LAKE}/in"})
        source = open_input(spec)

        def facts_after(*names: str) -> str | None:
            (tmp_path / "new").mkdir()
            for name in names:
                (tmp_path / "new" / name.rpartition("/")[2]).write_bytes(png(1)[::-1])
            folder = {name.rpartition("/")[0] for name in names} or {""}
            upload(tmp_path / "new", f"{folder.pop()}/")
            shutil.rmtree(tmp_path / "new")
            asked.clear()
            facts = image_file_facts(spec, source)
            assert all("list-type=2" in path and "prefix=in%2F" in path for path in asked)
            assert len(asked) == 1
            return facts

        first = facts_after()
        assert first is not None
        assert facts_after("in/other.png", "in/sub/other.png") == first
        assert facts_after("secret.png") == first
        changed = [facts_after("in/a.png"), facts_after("in/sub/b c#1%20.png")]
        changed.append(facts_after("in/sub/gone.png"))
        assert len({first, *changed}) == 4


def test_files_that_cannot_be_listed_have_no_facts(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_to_list(request: Request) -> int | None:
        return 403 if "list-type" in request.path else None

    with between(address, refuse_to_list) as proxy:
        point_to(proxy, monkeypatch)
        rows = pa.table({"text": ["a"], "image": ["a.png"]})
        spec = job(tmp_path, Path("model"), rows, input={"media_root": f"{LAKE}/in"})
        assert image_file_facts(spec, open_input(spec)) is None


@pytest.mark.long
def test_an_update_runs_the_rows_of_a_changed_image(tmp_path: Path) -> None:
    model = make_vision_folder("llava", tmp_path / "model")
    rows = pa.table({"text": [*"abc"], "image": ["a.png", "sub/b c#1%20.png", "a.png"]})
    spec = job(tmp_path, model, rows, input={"media_root": f"{LAKE}/in"})
    assert run_job(spec, quiet=True) is ExitCode.OK
    first = results(tmp_path)
    (tmp_path / "uploaded" / "in" / "a.png").write_bytes(png(2))
    upload(tmp_path / "uploaded", "")
    assert run_job(spec, update=True, quiet=True) is ExitCode.OK
    assert [a == b for a, b in zip(first, results(tmp_path), strict=True)] == [False, True, False]
    assert parse_json((tmp_path / "out" / "summary.json").read_bytes())["rows"]["reused"] == 1


def test_a_store_that_refuses_is_an_error_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with complaining_server(403) as address:
        point_to(address, monkeypatch)
        (file,) = MediaFiles(f"{LAKE}/in").in_cell("a.png", "x")
        with pytest.raises(RowError, match=f"{LAKE}/in/a.png: ") as raised:
            file.read()
    assert raised.value.code == "invalid_image"
