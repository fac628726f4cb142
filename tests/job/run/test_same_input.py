"""Jobs resume after their input or folder was touched, moved or changed."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ExitCode, LockedError
from batchinfer.job.input import changed_files
from batchinfer.job.run.run_job import run_job
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, TellingBuild, job
from tests.job.output.test_resume import stop_at

NAMES = ("a.parquet", "b.parquet", "sub/c.parquet")
ROWS = 10


def write_plain(path: Path, prompts: list[str]) -> None:
    """Write a file with plain, uncompressed texts and no checksums."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"prompt": prompts})
    pq.write_table(table, path, compression="none", use_dictionary=False)


def stopped_at(root: Path) -> set[int]:
    """Stop a job on three files halfway; return its unfinished rows."""
    for at, name in enumerate(NAMES):
        write_plain(root / "in" / name, [f"{at} row {row:02d}" for row in range(ROWS)])
    build = TellingBuild(max_num_seqs=4)
    build.before_step = stop_at(40)
    assert run_job(job(root), build=build, quiet=True) is ExitCode.INTERRUPTED
    kept = [
        row
        for path in (root / "out" / "_batchinfer" / "segments").iterdir()
        for row in pq.read_table(path)["row_id"].to_pylist()
    ]
    kept += [at * 10 + n for at, _ in enumerate((root / "out/data").iterdir()) for n in range(10)]
    assert kept
    return set(range(30)) - set(kept)


def ran(root: Path, **sections: Any) -> set[int]:
    """Finish the job; return the rows that ran."""
    build = TellingBuild()
    assert run_job(job(root, **sections), build=build, quiet=True) is ExitCode.OK
    return set(build.ran)


def touch(root: Path) -> Path:
    for name in NAMES:
        os.utime(root / "in" / name)
    return root


def move_all(root: Path) -> Path:
    return Path(shutil.move(root, root.with_name("moved")))


def copy_all(root: Path) -> Path:
    return Path(shutil.copytree(root, root.with_name("copied")))


def rename_files(root: Path) -> Path:
    for name, new in zip(NAMES, ("0.parquet", "b2.parquet", "sub/x.parquet"), strict=True):
        (root / "in" / name).rename(root / "in" / new)
    return root


@pytest.mark.parametrize("change", [touch, move_all, copy_all, rename_files])
def test_touched_moved_or_renamed_input_resumes(
    tmp_path: Path, change: Callable[[Path], Path]
) -> None:
    unfinished = stopped_at(tmp_path / "job")
    root = change(tmp_path / "job")
    assert ran(root) == unfinished
    assert run_job(job(root), build=FakeBuild(), quiet=True) is ExitCode.OK, "nothing to do"


def test_moved_input_resumes(tmp_path: Path) -> None:
    unfinished = stopped_at(tmp_path)
    (tmp_path / "in").rename(tmp_path / "elsewhere")
    place = {"path": [str(tmp_path / "elsewhere" / name) for name in NAMES]}
    assert ran(tmp_path, input=place) == unfinished


def swap(folder: Path) -> None:
    (folder / "a.parquet").rename(folder / "x")
    (folder / "b.parquet").rename(folder / "a.parquet")
    (folder / "x").rename(folder / "b.parquet")


def edit_a_page(folder: Path) -> None:
    """Change a byte of a row, but not the file's size, footer or modification time."""
    path = folder / "b.parquet"
    data = path.read_bytes()
    other = data.replace(b"1 row 03", b"1 row 83")
    assert other != data
    assert len(other) == len(data)
    status = path.stat()
    path.write_bytes(other)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def append(folder: Path) -> None:
    write_plain(folder / "b.parquet", [f"1 row {row:02d}" for row in range(ROWS + 1)])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (swap, r"the files are in a different order, starting with \S*in/a\.parquet"),
        (edit_a_page, r"in/b\.parquet has different content"),
        (append, r"in/b\.parquet has different content"),
        (lambda folder: (folder / "b.parquet").unlink(), r"in/b\.parquet is gone"),
        (
            lambda folder: write_parquet(folder / "b1.parquet", {"prompt": ["new"]}),
            r"in/b1\.parquet is new",
        ),
    ],
    ids=["swap", "edit a page", "append", "delete", "add"],
)
@pytest.mark.parametrize("is_moved", [False, True])
def test_changed_input_is_named(
    tmp_path: Path, change: Callable[[Path], object], says: str, is_moved: bool
) -> None:
    stopped_at(tmp_path / "job")
    root = move_all(tmp_path / "job") if is_moved else tmp_path / "job"
    change(root / "in")
    build = FakeBuild()
    with pytest.raises(changed_files.DataError, match=says):
        run_job(job(root), build=build, quiet=True)
    assert build.count == 0


def test_compressed_jsonl_resumes(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"prompt": f"row {row}"}) + "\n" for row in range(12)).encode()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.jsonl").write_bytes(lines)
    assert ran(tmp_path) == set(range(12))
    (tmp_path / "in" / "x.jsonl").unlink()
    (tmp_path / "in" / "y.jsonl.gz").write_bytes(gzip.compress(lines))
    assert ran(tmp_path) == set()


def test_renamed_partition_folder_is_another_input(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "lang=en" / "a.parquet", {"prompt": ["a"]})
    assert ran(tmp_path) == {0}
    (tmp_path / "in").rename(tmp_path / "moved")
    moved = {"path": str(tmp_path / "moved")}
    assert ran(tmp_path, input=moved) == set()
    (tmp_path / "moved" / "lang=en").rename(tmp_path / "moved" / "lang=de")
    with pytest.raises(LockedError, match=r"input\.path was"):
        ran(tmp_path, input=moved)


def as_before(out: Path) -> None:
    """Rewrite the plan as earlier versions did; they compared files only by path and time."""
    for name in ("manifest.json", "manifest-copy.json"):
        path = out / "_batchinfer" / name
        plan = json.loads(path.read_bytes())
        for file in plan["inputs"]:
            del file["content_hash"], file["partition"]
        path.write_text(json.dumps(plan))


def test_plan_of_an_older_version_resumes(tmp_path: Path) -> None:
    unfinished = stopped_at(tmp_path)
    as_before(tmp_path / "out")
    assert ran(tmp_path) == unfinished


def test_plan_of_an_older_version_compares_file_times(tmp_path: Path) -> None:
    stopped_at(tmp_path)
    as_before(tmp_path / "out")
    touch(tmp_path)
    with pytest.raises(changed_files.DataError, match=r"in/a\.parquet has different content"):
        ran(tmp_path)


def test_unchanged_file_is_not_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_at(tmp_path)
    hashed: list[str] = []
    real = changed_files.content_hash

    def count(path: Path, on_read: Any) -> str:
        hashed.append(path.name)
        return real(path, on_read)

    monkeypatch.setattr(changed_files, "content_hash", count)
    monkeypatch.setattr(changed_files, "is_settled", lambda *_: True)
    os.utime(tmp_path / "in" / "b.parquet")
    ran(tmp_path)
    assert hashed == ["b.parquet"]


def test_file_written_just_now_is_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file's time would not show a second change within the same clock tick."""
    stopped_at(tmp_path)
    monkeypatch.setattr(changed_files, "content_hash", lambda path, _: f"of {path.name}")
    with pytest.raises(changed_files.DataError, match="has different content"):
        ran(tmp_path)
