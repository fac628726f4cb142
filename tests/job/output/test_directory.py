from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchinfer.errors import DataError, LockedError, StorageError
from batchinfer.job.input.format import InputFile
from batchinfer.job.manifest import Manifest, read_manifest
from batchinfer.job.output.commit import publish, stage
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.open import output_at
from batchinfer.job.output.stats_tables import REQUESTS_SCHEMA
from batchinfer.job.row_ranges import Part
from tests.job import fakes
from tests.job.datasets import flip_bit

NO_REQUESTS = REQUESTS_SCHEMA.empty_table()
FILE = InputFile("/data/a.parquet", 100, 1, 25, "f00")
MANIFEST = Manifest(
    "abc",
    {"sampling": {"top_p": 1.0}, "task": "generate"},
    ("/data",),
    (FILE,),
    25,
    10,
    "2026-11-20T10:00:00",
)
RECORD = {"rows": 10, "error_codes": {"x": 1}, "control_text_row_ids": [3]}
TORN = [b"", b"{", b"[]", b'{"rows": 10}', b"[" * 100_000]
IMPOSSIBLE: list[dict[str, Any]] = [
    {"rows": 9},
    {"rows": 10.0},
    {"error_codes": [3]},
    {"error_codes": {"x": "y"}},
    {"error_codes": {"x": True}},
    {"error_codes": {"x": -1}},
    {"error_codes": {"x": 6, "y": 5}},
    {"control_text_row_ids": [3, 3]},
    {"control_text_row_ids": [10]},
    {"size": -1},
    {"mtime_ns": False},
]
ROWS = [range(10), range(10, 20), range(20, 25)]


@pytest.fixture
def out(tmp_path: Path) -> OutputDir:
    return OutputDir(tmp_path / "out")


def begin(out: OutputDir, manifest: Manifest = MANIFEST, if_exists: str = "resume") -> list[Part]:
    return fakes.begin(out, manifest, if_exists)


def commit(out: OutputDir, part: Part) -> Path:
    publish(out, part, stage(out, part, pa.table({"row_id": list(part.rows)}), NO_REQUESTS, []))
    return out.data / f"{part.name}.parquet"


def empty(path: Path) -> None:
    path.write_bytes(b"")


def begun(out: OutputDir) -> Path:
    """Begin a job and finish its first part; return the part's file."""
    return commit(out, begin(out)[0])


OTHER_FILE = replace(FILE, path="/data/b.parquet", size=7, content_sha256="e01")
MODEL = {"model": {"model.safetensors": "a1"}}


@pytest.mark.parametrize(
    ("changes", "leads_with"),
    [
        ({"job": {**MANIFEST.job, "sampling": {"top_p": 0.9}}}, "use --update"),
        (
            {"job": {**MANIFEST.job, "prompt": {"column": "b"}}, "inputs": (OTHER_FILE,)},
            "use --update",  # the file at this path was corrected
        ),
        ({"job": {**MANIFEST.job, "task": "score"}}, "use --output"),
        ({"job": {**MANIFEST.job, "model_facts": MODEL}}, "use --update"),  # trained further
        ({"job": {**MANIFEST.job, "model_facts": {"model": {"name": "b"}}}}, "use --output"),
        ({"input_paths": ("/other",), "inputs": (OTHER_FILE,)}, "use --output"),
    ],
    ids=["sampling", "prompt and input repaired", "task", "model file", "model", "input"],
)
def test_hint_fits_the_change_of_the_job(changes: dict[str, Any], leads_with: str) -> None:
    now = replace(MANIFEST, fingerprint="other", **changes)
    with pytest.raises(LockedError) as caught:
        MANIFEST.check_same_job(now, "/out")
    advice = str(caught.value).splitlines()[1]
    assert advice.startswith(leads_with)
    assert ("--update" in advice) == (leads_with == "use --update")


def test_copied_part_with_another_time_is_kept(out: OutputDir) -> None:
    os.utime(begun(out), ns=(5, 5))
    assert [part.rows for part in begin(out)] == ROWS[1:]


def test_part_time_is_trusted_only_with_trust_times(out: OutputDir) -> None:
    path, part = begun(out), MANIFEST.parts()[0]
    written = path.stat().st_mtime_ns
    flip_bit(path, 40)
    os.utime(path, ns=(written, written))
    assert out.finished(part, "times") is not None
    with pytest.raises(DataError, match="its hash differs"):
        out.finished(part)
    os.utime(path, ns=(written + 1, written + 1))
    with pytest.raises(DataError, match="its hash differs"):
        out.finished(part, "times")


@pytest.mark.parametrize("record", TORN)
def test_part_with_a_torn_record_is_made_again(out: OutputDir, record: bytes) -> None:
    begun(out)
    (out.parts / "part-00000.json").write_bytes(record)
    assert [part.rows for part in begin(out)] == ROWS


@pytest.mark.parametrize("changes", IMPOSSIBLE)
def test_part_with_an_invalid_record_is_made_again(out: OutputDir, changes: dict[str, Any]) -> None:
    begun(out)
    path = out.parts / "part-00000.json"
    stored = json.loads(path.read_bytes())
    path.write_text(json.dumps(stored | RECORD))
    assert [part.rows for part in begin(out)] == ROWS[1:], "the values before the change are valid"
    path.write_text(json.dumps(stored | RECORD | changes))
    assert [part.rows for part in begin(out)] == ROWS


def test_changed_job_may_begin_if_no_part_is_finished(out: OutputDir) -> None:
    begin(out)
    changed = replace(MANIFEST, fingerprint="def", job={})
    begin(out, changed)
    assert read_manifest(out.manifest) == changed


@pytest.mark.parametrize(
    "changes", [{"fingerprint": "def", "job": {}}, {"inputs": (replace(FILE, mtime_ns=2),)}]
)
def test_unfinished_files_of_another_plan_are_deleted(
    out: OutputDir, changes: dict[str, Any]
) -> None:
    part = begin(out)[2]
    left = [out.steps / "run-00001-000000.parquet", out.runs / "run-00001.json"]
    left += [out.request_stats(part), out.data / f"{part.name}.parquet"]
    for path in left:
        path.touch()
    begin(out)
    assert all(path.exists() for path in left), "the same plan keeps the files"
    begin(out, replace(MANIFEST, **changes))
    assert not any(path.exists() for path in left)


def test_damaged_manifest_without_finished_parts_is_replaced(out: OutputDir) -> None:
    begin(out)
    for path in (out.manifest, out.manifest_copy):
        path.write_bytes(b"{")
    begin(out)
    assert read_manifest(out.manifest) == MANIFEST


def misspell(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"inputs"', b'"inp'))


def misdate(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"2026-11", b"2026-91"))


@pytest.mark.parametrize("harm", [misspell, misdate, Path.unlink, empty])
@pytest.mark.parametrize("name", ["manifest.json", "manifest-copy.json"])
def test_damaged_manifest_is_restored_from_its_copy(out: OutputDir, harm, name: str) -> None:
    begun(out)
    harm(out.state / name)
    later = replace(MANIFEST, planned_at="2026-12-24T10:00:00")
    assert [part.rows for part in begin(out, later)] == ROWS[1:]
    assert read_manifest(out.manifest) == read_manifest(out.manifest_copy) == MANIFEST


@pytest.mark.parametrize(("harm", "what"), [(empty, "damaged"), (Path.unlink, "missing")])
def test_finished_parts_without_a_manifest_are_refused(out: OutputDir, harm, what: str) -> None:
    part = begun(out)
    for path in (out.manifest, out.manifest_copy):
        harm(path)
    with pytest.raises(DataError, match=rf"manifest\.json is {what}.*\n.*move .*out away"):
        begin(out)
    assert part.exists()
    assert [part.rows for part in begin(out, if_exists="overwrite")] == ROWS
    assert not part.exists()


def test_overwrite_deletes_old_output(out: OutputDir) -> None:
    begun(out)
    out.success.touch()
    out.write_json(out.summary, {})
    other = replace(MANIFEST, fingerprint="def", job={})
    assert len(begin(out, other, "overwrite")) == 3
    assert sorted(path.name for path in out.root.iterdir()) == ["_batchinfer", "data", "stats"]
    assert list(out.data.iterdir()) == []


def test_failed_overwrite_leaves_no_success_and_can_be_repeated(
    out: OutputDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(out)
    out.success.touch()

    delete = out.files.delete

    def refuse(path: Path) -> None:
        if path == out.runs:
            raise OSError(errno.EIO, "Input/output error")
        delete(path)

    with monkeypatch.context() as patch:
        patch.setattr(out.files, "delete", refuse)
        with pytest.raises(StorageError, match="Input/output error"):
            begin(out, if_exists="overwrite")
    assert not out.success.exists()
    assert len(begin(out, if_exists="overwrite")) == 3


@pytest.mark.parametrize("if_exists", ["resume", "overwrite"])
@pytest.mark.parametrize(
    "name",
    [
        *("data/precious.csv", "data/part-00000.parquet", "stats/steps.parquet", "summary.json"),
        *("report.html", "openai/errors.jsonl", "_SUCCESS"),
    ],
)
def test_foreign_files_are_refused_and_kept(out: OutputDir, if_exists: str, name: str) -> None:
    (out.root / name).parent.mkdir(parents=True)
    (out.root / name).write_text("precious")
    with pytest.raises(
        LockedError, match=rf"{name} is not from batchinfer: there is no manifest\.json"
    ):
        begin(out, if_exists=if_exists)
    assert (out.root / name).read_text() == "precious"


def test_output_path_that_cannot_be_followed_is_named(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    for name, reason in (("circle", "Too many levels"), ("n" * 300, "too long")):
        with pytest.raises(StorageError, match=rf"cannot read .*/{name[:99]}.*: .*{reason}"):
            output_at(str(tmp_path / name / "out"))


@pytest.mark.parametrize("name", ["notes.csv", "part-00000"])
def test_overwrite_refuses_foreign_files_in_data(out: OutputDir, name: str) -> None:
    file = begun(out)
    (out.data / name).mkdir()
    with pytest.raises(LockedError, match=rf"data/{name} was not written by batchinfer"):
        begin(out, if_exists="overwrite")
    assert sorted(out.data.iterdir()) == sorted([file, out.data / name])
    assert len(begin(out)) == 2, "the job can be resumed"


@pytest.mark.parametrize("name", ["part-00003.parquet", "part-old.parquet", "x.parquet"])
def test_foreign_parquet_file_in_data_is_refused(out: OutputDir, name: str) -> None:
    stray = out.data / name
    begin(out)
    for _ in range(2):
        stray.touch()
        with pytest.raises(LockedError, match=rf"data/{name} is not a part of this job"):
            begin(out)
        stray.unlink()
        begun(out)


def test_overwrite_keeps_foreign_files_outside_data(out: OutputDir) -> None:
    begun(out)
    kept = [out.root / "README", out.stats / "plot.png", out.root / "openai.txt"]
    for path in kept:
        path.touch()
    begin(out, if_exists="overwrite")
    assert all(path.exists() for path in kept)


def test_success_is_deleted_when_a_part_is_missing(out: OutputDir) -> None:
    for part in begin(out):
        path = commit(out, part)
    out.success.touch()
    assert begin(out) == []
    assert out.success.exists()
    path.unlink()
    assert len(begin(out)) == 1
    assert not out.success.exists()


def test_lock_error_without_a_readable_holder(out: OutputDir) -> None:
    with out.locked():
        (out.state / "lock.json").write_bytes(b"[1]")
        with pytest.raises(LockedError, match=r"is writing to .*out\n"), out.locked():
            pass


def test_a_killed_holders_lock_is_free_at_once(out: OutputDir) -> None:
    killed = (
        "import os, sys; from pathlib import Path\n"
        "from batchinfer.job.output.directory import OutputDir\n"
        "with OutputDir(Path(sys.argv[1])).locked(): os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", killed, str(out.root)], check=False)
    assert done.returncode == -9
    assert (out.state / "lock.json").exists()
    with out.locked():
        assert json.loads((out.state / "lock.json").read_bytes())["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "No space left on device\nfree space"),
        (errno.EROFS, "Read-only file system\nuse --output"),
        (errno.EACCES, "Permission denied\nfix the permissions"),
        (errno.EFBIG, "File too large\nallow larger files"),
    ],
)
def test_part_that_cannot_be_written_is_not_finished(
    out: OutputDir, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    part = begin(out)[0]

    def refuse(source: object, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StorageError, match=rf"part-00000\.parquet: {says}"):
        commit(out, part)
    assert out.finished(part) is None
    assert list(out.data.iterdir()) == []


def test_part_record_content(out: OutputDir) -> None:
    part = begin(out)[0]
    error = {"code": "empty_prompt", "message": "why"}
    errors = [error if row_id in (3, 4) else None for row_id in part.rows]
    table = pa.table({"row_id": list(part.rows), "error": errors})
    publish(out, part, stage(out, part, table, NO_REQUESTS, [5, 7]))
    record = out.finished(part)
    assert record.rows == 10
    assert record.error_codes == {"empty_prompt": 2}
    assert record.control_text_row_ids == [5, 7]
    stored = json.loads((out.parts / "part-00000.json").read_bytes())
    assert stored["sha256"] == record.sha256
