"""Facts about the image files that rows name: they change with the files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchinfer.job.images import changed_images
from batchinfer.job.images.changed_images import image_file_facts
from batchinfer.job.job import open_input
from tests.job.images.pictures import HUB_IMAGE
from tests.job.images.test_image_jobs import job, talks_with_hub_images


def facts(folder: Path, rows: pa.Table, **changes: Any) -> str | None:
    spec = job(folder, Path("model"), rows, **changes)
    return image_file_facts(spec, open_input(spec))


def rows_of(*images: Any, kind: pa.DataType | None = None) -> pa.Table:
    return pa.table({"text": ["a"] * len(images), "image": pa.array(images, kind)})


def test_each_change_of_a_file_changes_the_facts(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    rows = rows_of("a.png", None, "gone.png", "file://" + str(file), "http://host/b.png", "\0")
    found = [facts(tmp_path, rows)]

    def add() -> None:
        os.utime(file, ns=(0, 10**9))
        found.append(facts(tmp_path, rows))
        assert facts(tmp_path, rows) == found[-1]

    file.write_bytes(b"one")
    add()
    file.write_bytes(b"longer")
    add()
    os.utime(file, ns=(0, 1))
    found.append(facts(tmp_path, rows))
    assert len(set(found)) == 4
    assert None not in found


def test_files_are_named_in_all_places_of_images(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"1")
    body = {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]}]
    }
    request = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(request))
    requests = {"path": str(tmp_path / "requests.jsonl"), "format": "openai-batch"}
    named = {"bytes": None, "path": "a.png"}

    def all_facts() -> list[str | None]:
        hub = rows_of([named], kind=pa.list_(HUB_IMAGE))
        talks = talks_with_hub_images(named)
        return [
            facts(tmp_path, hub),
            facts(tmp_path, talks, prompt={"images": None}),
            facts(tmp_path, hub, input=requests, prompt={"column": None, "images": None}),
        ]

    before = all_facts()
    assert None not in before
    (tmp_path / "a.png").write_bytes(b"22")
    assert not set(before) & set(all_facts())


def test_rows_that_name_no_file_have_no_facts(tmp_path: Path) -> None:
    held = {"bytes": b"1", "path": "a.png"}
    assert facts(tmp_path, rows_of(b"1", b"2", kind=pa.binary())) is None
    assert facts(tmp_path, rows_of(held, kind=HUB_IMAGE)) is None
    assert facts(tmp_path, rows_of("a.png"), prompt={"images": None}) is None
    store = {"media_root": "s3://lake/in"}
    assert facts(tmp_path, rows_of("http://host/a.png"), input=store) is None


def test_rows_with_many_embedded_images_are_not_read_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_images, "_MOST_EMBEDDED", 1000)
    held, named = {"bytes": bytes(600), "path": None}, {"bytes": None, "path": "a.png"}
    rows = [held, held, *[None] * 1024, named]
    assert facts(tmp_path, rows_of(*rows, kind=HUB_IMAGE)) is None
    assert facts(tmp_path, rows_of(*rows[1:], kind=HUB_IMAGE)) is not None
