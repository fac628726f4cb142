"""Pictures of a report's example rows, from all places that hold or name images."""

from __future__ import annotations

import base64
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchinfer.job.images.media_files import StoreImage
from batchinfer.report import thumbnails
from batchinfer.report.thumbnails import Pictures
from tests.job.images.pictures import HUB_IMAGE, png

URL = "data:image/png;base64," + base64.b64encode(png(1)).decode()
PART = pa.struct([("type", pa.string()), ("text", pa.string()), ("image", HUB_IMAGE)])
TALKS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.list_(PART))]))


def count(job: dict[str, Any], folder: Path, values: Any, kind: Any, name: str) -> list[int]:
    """Return the number of pictures of each row of a table with one column."""
    found = Pictures(job, str(folder / "rows.parquet"))
    rows = pa.record_batch({name: pa.array(values, kind)})
    assert found.read_columns(rows.schema) == [name]
    return [len(found.of(rows.slice(at, 1))) for at in range(len(rows))]


def test_conversations_have_pictures(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    held, named = {"bytes": png(0), "path": None}, {"bytes": None, "path": "a.png"}
    gone = {"bytes": None, "path": "gone.png"}
    talks = [
        [{"role": "user", "content": [{"type": "image", "text": None, "image": image}]}]
        for image in (held, named, gone)
    ]
    assert count({"prompt": {"column": "talk"}}, tmp_path, talks, TALKS, "talk") == [1, 1, 0]
    assert count({}, tmp_path, talks, TALKS, "messages") == [1, 1, 0]


def test_requests_have_pictures(tmp_path: Path) -> None:
    part = f'{{"type": "image_url", "image_url": {{"url": "{URL}"}}}}'
    body = f'{{"messages": [{{"role": "user", "content": [{part}, {part}]}}]}}'
    job = {"input": {"format": "openai-batch"}}
    assert count(job, tmp_path, [body, None, "{}"], pa.string(), "body") == [2, 0, 0]


def test_a_renamed_column_has_pictures(tmp_path: Path) -> None:
    job = {"prompt": {"images": "image"}, "output": {"rename": {"image": "scan"}}}
    assert count(job, tmp_path, [png(0), None], pa.binary(), "scan") == [1, 0]


def test_a_picture_on_the_web_does_not_hide_others(tmp_path: Path) -> None:
    cells = [["http://127.0.0.1/a.png", URL]]
    job = {"prompt": {"images": "image"}}
    assert count(job, tmp_path, cells, pa.list_(pa.string()), "image") == [1]


def test_a_store_that_hangs_delays_the_page_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    answer = threading.Event()
    reads: list[str] = []

    def read(file: StoreImage) -> bytes:
        reads.append(file.name)
        answer.wait()
        return b""

    monkeypatch.setattr(StoreImage, "read", read)
    monkeypatch.setattr(thumbnails, "STORE_S", 0.05)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    job = {"prompt": {"images": "image"}, "input": {"media_root": "s3://lake/in"}}
    try:
        assert count(job, tmp_path, ["a.png", "b.png", "c.png"], pa.string(), "image") == [0] * 3
    finally:
        answer.set()
    assert reads == ["s3://lake/in/a.png"]
