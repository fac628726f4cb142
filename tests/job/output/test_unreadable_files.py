"""Unreadable files do not count as damaged: reads are repeated, and no finished row runs again."""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ExitCode, StorageError
from batchinfer.job.output.open import output_at
from batchinfer.job.output.verify import verify
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.storage.filesystem import READ_TRIES
from tests.job.datasets import flip_bit
from tests.job.fakes import job
from tests.job.output.test_resume import Build, prompts, stop_at

KEPT = [
    *("manifest.json", "parts/part-00000.json", "data/part-00000.parquet"),
    *("requests/part-00000.parquet", "segments/segment-*.parquet", "runs/run-00001.json"),
]
"""Files of a stopped run that a later run reads, as patterns for ``Path.match``."""


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a stopped job with a finished part, and finished rows of other parts."""
    folder = tmp_path_factory.mktemp("stopped")
    prompts(folder)
    assert run_job(in_order(folder), quiet=True, build=Build(stop_at(45))) is ExitCode.INTERRUPTED
    assert list(folder.glob("out/data/*.parquet"))
    assert list(folder.glob("out/_batchinfer/segments/*.parquet"))
    return folder


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    """Return a copy of the stopped job."""
    return shutil.copytree(stopped_once, tmp_path, dirs_exist_ok=True)


def in_order(folder: Path) -> JobSpec:
    return job(folder, engine={"order": "input"})


@contextmanager
def failing_reads(
    pattern: str, times: int, number: int, patch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """Make the first ``times`` reads of matching files fail; yield the paths of the failed
    reads."""
    failed: list[str] = []

    class Failing(io.FileIO):
        def _fail(self) -> None:
            path = str(self.name)
            if Path(path).match(pattern) and len(failed) < times:
                failed.append(path)
                raise OSError(number, os.strerror(number), path)

        def readinto(self, buffer: Any) -> int:
            self._fail()
            return super().readinto(buffer)

        def readall(self) -> bytes:
            self._fail()
            return super().readall()

    with patch.context() as patched:
        patched.setattr(io, "FileIO", Failing)
        yield failed


def finish(folder: Path) -> list[int]:
    """Finish the job; return the rows that ran."""
    build = Build()
    assert run_job(in_order(folder), quiet=True, build=build) is ExitCode.OK
    return build.ran


def finished_rows(folder: Path) -> set[int]:
    out = folder / "out"
    files = [*out.glob("data/*.parquet"), *out.glob("_batchinfer/segments/*.parquet")]
    return {row for file in files for row in pq.read_table(file)["row_id"].to_pylist()}


@pytest.mark.parametrize(
    ("pattern", "number"),
    [(pattern, (errno.EIO, errno.ENOMEM)[at % 2]) for at, pattern in enumerate(KEPT)],
)
def test_failed_read_is_repeated(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, number: int
) -> None:
    done = finished_rows(stopped)
    with failing_reads(pattern, READ_TRIES - 1, number, monkeypatch) as failed:
        assert not done & set(finish(stopped))
    assert failed, "the file was read"
    assert verify(output_at(str(stopped / "out"))).problems == []


@pytest.mark.parametrize("pattern", KEPT)
def test_unreadable_file_ends_the_run_and_no_row_is_computed_again(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    done, build = finished_rows(stopped), Build()
    name = pattern.rpartition("/")[2].replace("*", ".*")
    says = rf"cannot read .*{name}: Input/output error\ncheck the disk, then run again"
    with (
        failing_reads(pattern, 10**9, errno.EIO, monkeypatch),
        pytest.raises(StorageError, match=says),
    ):
        run_job(in_order(stopped), quiet=True, build=build)
    assert not done & set(build.ran)
    assert not done & set(finish(stopped))


def test_damaged_part_is_made_again_despite_failing_reads(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = stopped / "out" / "data" / "part-00000.parquet"
    flip_bit(part, 60)
    os.utime(part)
    with failing_reads("*.parquet", 2, errno.EIO, monkeypatch):
        finish(stopped)
    assert pa.types.is_integer(pq.read_table(part)["row_id"].type)
    assert verify(output_at(str(stopped / "out"))).problems == []


def test_verify_names_unreadable_files(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = output_at(str(stopped / "out"))
    for pattern in ("data/part-00000.parquet", "segments/*.parquet"):
        with failing_reads(pattern, 10**9, errno.EIO, monkeypatch):
            assert all("Input/output error" in problem for problem in verify(out).problems)
            assert verify(out).problems


def test_unlistable_folder_is_a_storage_error(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listdir = os.listdir

    def refuse(path: Any) -> list[str]:
        if str(path).endswith("segments"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return listdir(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", refuse)
        with pytest.raises(StorageError, match=r"cannot read .*segments: Input/output error"):
            run_job(in_order(stopped), quiet=True, build=Build())
    finish(stopped)


def test_segment_is_kept_if_memory_is_short(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    done = finished_rows(stopped)
    with monkeypatch.context() as patched:
        patched.setattr(pq.ParquetFile, "read", refuse)
        with pytest.raises(
            StorageError, match=r"segment-.*: malloc of size 64 failed\nfree memory"
        ):
            run_job(in_order(stopped), quiet=True, build=Build())
    assert not done & set(finish(stopped))
