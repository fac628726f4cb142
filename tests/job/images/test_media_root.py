"""Outputs and the folder of their images: another folder makes another job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchinfer.errors import ExitCode, LockedError
from batchinfer.job.job import open_input, open_job
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from tests.job.images.pictures import png
from tests.job.images.test_image_jobs import job, results
from tests.vision_folders import make_vision_folder

PATHS = pa.table({"text": [*"abc"], "image": ["a.png", "b.png", None]})


def folder(at: Path, *numbers: int) -> Path:
    """Make a folder of pictures with these numbers."""
    at.mkdir()
    for name, number in zip("ab", numbers, strict=True):
        (at / f"{name}.png").write_bytes(png(number))
    return at


def fingerprint(spec: JobSpec) -> str:
    return open_job(spec, open_input(spec), lambda model: {}).manifest.fingerprint


def test_the_folder_of_images_is_in_the_fingerprint(tmp_path: Path) -> None:
    def of(root: Path | None, rows: pa.Table = PATHS, **prompt: Any) -> str:
        place = {} if root is None else {"media_root": str(root)}
        return fingerprint(job(tmp_path, Path("model"), rows, input=place, prompt=prompt))

    one, other = folder(tmp_path / "one", 1, 2), folder(tmp_path / "other", 1, 2)
    (tmp_path / "link").symlink_to(one)
    assert of(one) == of(one / ".." / "one") == of(tmp_path / "link")
    assert len({of(None), of(one), of(other)}) == 3
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(other)
    assert of(tmp_path / "link") == of(other)
    assert of(one, images=None) == of(None, images=None)


def test_the_folder_of_images_in_conversations_is_in_the_fingerprint(tmp_path: Path) -> None:
    part = pa.struct([("type", pa.string()), ("text", pa.string()), ("image_url", pa.string())])
    for content, counts in ((pa.list_(part), True), (pa.string(), False)):
        message = pa.struct([("role", pa.string()), ("content", content)])
        rows = pa.table({"text": pa.array([], pa.list_(message))})
        digests = {
            fingerprint(
                job(
                    tmp_path,
                    Path("model"),
                    rows,
                    input={"media_root": str(tmp_path / name)},
                    prompt={"images": None},
                )
            )
            for name in ("one", "other")
        }
        assert (len(digests) == 2) == counts


@pytest.mark.long
def test_an_update_runs_the_rows_whose_images_differ(tmp_path: Path) -> None:
    model = make_vision_folder("llava", tmp_path / "model")
    one, other = folder(tmp_path / "one", 1, 2), folder(tmp_path / "other", 1, 3)
    before, after = (
        job(tmp_path, model, PATHS, input={"media_root": str(root)}) for root in (one, other)
    )
    assert run_job(before, quiet=True) is ExitCode.OK
    first = results(tmp_path)
    with pytest.raises(LockedError, match=r"input\.media_root was "):
        run_job(after, quiet=True)
    assert run_job(after, update=True, quiet=True) is ExitCode.OK
    second = results(tmp_path)
    assert [row["error"] for row in second] == [None] * 3
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True]


@pytest.mark.long
def test_an_update_knows_changed_files_under_an_unchanged_table(tmp_path: Path) -> None:
    """A new time alone makes the update compare the images, whose rows keep their answers."""
    model = make_vision_folder("llava", tmp_path / "model")
    rows = pa.table({"text": [*"ab"], "image": ["a.png", "b.png"]})
    images = folder(tmp_path / "images", 1, 2)
    spec = job(tmp_path, model, rows, input={"media_root": str(images)})
    assert run_job(spec, quiet=True) is ExitCode.OK
    first = results(tmp_path)
    (images / "b.png").write_bytes(png(3))
    assert run_job(spec, quiet=True) is ExitCode.OK
    assert results(tmp_path) == first, "only --update compares images"
    assert run_job(spec, update=True, quiet=True) is ExitCode.OK
    second = results(tmp_path)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False]
    os.utime(images / "b.png", ns=(0, 0))
    assert run_job(spec, update=True, quiet=True) is ExitCode.OK
    assert results(tmp_path) == second
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert summary["rows"]["reused"] == 2
    part = tmp_path / "out" / "data" / "part-00000.parquet"
    before = part.stat().st_mtime_ns
    assert run_job(spec, update=True, quiet=True) is ExitCode.OK
    assert part.stat().st_mtime_ns == before, "there was nothing to do"
