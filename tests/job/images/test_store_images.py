"""Images in object stores; moto's server stands in for a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ExitCode, RowError
from batchinfer.job.images.media_files import MediaFiles
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.run.run_job import run_job
from batchinfer.job.storage import connection
from batchinfer.report.from_output import from_output
from tests.job.images.pictures import png
from tests.job.images.test_image_jobs import job, results
from tests.job.stores import LAKE, complaining_server, point_to, s3_server, upload
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


def test_a_store_that_refuses_is_an_error_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with complaining_server(403) as address:
        point_to(address, monkeypatch)
        (file,) = MediaFiles(f"{LAKE}/in").in_cell("a.png", "x")
        with pytest.raises(RowError, match=f"{LAKE}/in/a.png: ") as told:
            file.read()
    assert told.value.code == "invalid_image"
