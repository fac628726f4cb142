"""The swap of an output's generations, interrupted at each of its steps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer.errors import DataError, ExitCode, LockedError
from batchinfer.job.claims import swap_generation
from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.shared_claim import Role
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.verify import verify
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.stats.status import read_status
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job

STEPS = ("marked", "hidden", "copied", "cleared", "placed", "recorded", "deleted", "done")


class CutOff(BaseException):
    """Interrupts a run."""


def write_rows(folder: Path, *texts: str) -> None:
    write_parquet(folder / "in" / "x.parquet", {"prompt": list(texts)})


def spec_of(folder: Path, **sections: Any) -> JobSpec:
    return job(folder, output={"rows_per_part": 4}, **sections)


def run(spec: JobSpec, **options: Any) -> ExitCode:
    return run_job(spec, build=FakeBuild(), quiet=True, **options)


OLD = [f"{row} old" for row in range(14)]
NEW = [f"{row} new" for row in range(9)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished job whose new input makes fewer parts."""
    folder = tmp_path_factory.mktemp("finished")
    write_rows(folder, *OLD)
    assert run(spec_of(folder)) is ExitCode.OK
    write_rows(folder, *NEW)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished job."""
    return shutil.copytree(finished, tmp_path, dirs_exist_ok=True)


def files(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a job that ran once, on the new input."""
    folder = tmp_path_factory.mktemp("fresh")
    write_rows(folder, *NEW)
    assert run(spec_of(folder)) is ExitCode.OK
    return files(folder / "out")


def check_new(folder: Path, fresh: dict[str, bytes]) -> None:
    """Check that the output equals that of a single run on the new input."""
    out = folder / "out"
    assert not verify(OutputDir(out)).problems
    assert verify(OutputDir(out)).complete
    found = files(out)
    assert found.keys() == fresh.keys()
    assert [found[name] for name in data(fresh)] == [fresh[name] for name in data(fresh)]


def data(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith("data/")]


def test_update_replaces_the_output(folder: Path, fresh: dict[str, bytes]) -> None:
    assert run(spec_of(folder), update=True) is ExitCode.OK
    check_new(folder, fresh)
    build = FakeBuild()
    assert run_job(spec_of(folder), build=build, update=True, quiet=True) is ExitCode.OK
    assert build.count == 0


def cut_off_at(monkeypatch: pytest.MonkeyPatch, step: str, times: int) -> None:
    """Interrupt a swap the ``times``-th time it reaches a step."""
    left = iter(range(times, 0, -1))

    def failpoint(name: str) -> None:
        if name == f"swap-{step}" and next(left) == 1:
            raise CutOff

    monkeypatch.setattr(swap_generation, "failpoint", failpoint)


@pytest.mark.parametrize(("step", "update"), [(step, at % 2 > 0) for at, step in enumerate(STEPS)])
def test_interrupted_swap_is_completed(
    folder: Path, fresh: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, step: str, update: bool
) -> None:
    cut_off_at(monkeypatch, step, times=1 if step not in ("copied", "cleared") else 3)
    with pytest.raises(CutOff):
        run(spec_of(folder), update=True)
    if step != "done":
        problem, line = verify(OutputDir(folder / "out")).lines()
        assert problem.endswith("is being updated and holds both old and new files")
        assert line.endswith("run the job again without --shard to finish this")
    if step == "copied":
        lines = "\n".join(read_status(OutputDir(folder / "out"), 0.0).lines())
        assert "some of the old files; run the job again to finish" in lines
    monkeypatch.undo()
    assert run(spec_of(folder), update=update) is ExitCode.OK
    check_new(folder, fresh)


@pytest.mark.parametrize("options", [{"update": True}, {"overwrite": True}])
def test_live_progress_files_survive(folder: Path, options: dict[str, bool]) -> None:
    """A thread writes these files all the time, so their folder cannot be deleted."""
    live = OutputDir(folder / "out").live
    Path(live).mkdir(exist_ok=True)
    (Path(live) / "other.json").write_text("{}")
    assert run(spec_of(folder), **options) is ExitCode.OK
    assert (Path(live) / "other.json").exists()


@pytest.mark.parametrize("before", [False, True])
def test_interrupted_swap_of_partitioned_files_is_completed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    by_status = spec_of(folder)
    by_status = by_status.model_copy(
        update={"output": by_status.output.model_copy(update={"partition_by": ("status",)})}
    )
    if before:
        write_rows(folder, *OLD)
        assert run(by_status) is ExitCode.OK
        write_rows(folder, *NEW)

    def failpoint(name: str) -> None:
        if name == "swap-copied" and len(swapped(folder)) == 2:
            raise CutOff

    monkeypatch.setattr(swap_generation, "failpoint", failpoint)
    with pytest.raises(CutOff):
        run(by_status, update=True)
    assert "is being updated" in " ".join(verify(OutputDir(folder / "out")).problems)
    monkeypatch.undo()
    assert run(by_status) is ExitCode.OK
    assert verify(OutputDir(folder / "out")).problems == []
    assert len(swapped(folder)) == 3


def swapped(folder: Path) -> list[Path]:
    """Return the partitioned files with new rows."""
    found = sorted((folder / "out" / "partitioned").rglob("*.parquet"))
    return [path for path in found if "new" in pq.ParquetFile(path).read()["prompt"][0].as_py()]


def half_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt an update after it has moved some of its files into place."""
    cut_off_at(monkeypatch, "copied", times=3)
    with pytest.raises(CutOff):
        run(spec_of(folder), update=True)
    monkeypatch.undo()


def test_shard_is_refused_during_a_swap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half_way(folder, monkeypatch)
    with pytest.raises(LockedError, match=r"is being updated.*\n.*without --shard"):
        run(spec_of(folder), role=Role(Shard(0, 2)))


def test_old_job_is_refused_after_an_interrupted_swap(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_way(folder, monkeypatch)
    write_rows(folder, *OLD)
    with pytest.raises(DataError, match=r"x\.parquet has different content"):
        run(spec_of(folder))
    write_rows(folder, *NEW)
    assert run_job(spec_of(folder), build=None, quiet=True) is ExitCode.OK, "the swap is completed"


def test_overwrite_works_despite_a_damaged_swap(
    folder: Path, fresh: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    half_way(folder, monkeypatch)
    (folder / "out" / "_batchinfer" / "swap.json").write_text("torn")
    with pytest.raises(DataError, match=r"swap\.json is damaged"):
        run(spec_of(folder))
    assert run(spec_of(folder), overwrite=True) is ExitCode.OK
    check_new(folder, fresh)


def test_incomplete_generation_is_not_put_in_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_way(folder, monkeypatch)
    before = files(folder / "out")
    (record,) = (folder / "out").glob("_batchinfer/next/*/_batchinfer/parts/part-00001.json")
    kept = record.read_bytes()
    record.unlink()
    with pytest.raises(DataError, match=r"its part-00001 is missing"):
        run(spec_of(folder))
    record.write_bytes(kept)
    assert data(files(folder / "out")) == data(before)
    assert run(spec_of(folder)) is ExitCode.OK


def test_update_keeps_foreign_files(folder: Path) -> None:
    kept = [folder / "out" / name for name in ("notes.txt", "stats/mine.csv")]
    for path in kept:
        path.write_text("mine")
    assert run(spec_of(folder), update=True) is ExitCode.OK
    assert all(path.exists() for path in kept)


def test_update_on_a_file_system_without_links(
    folder: Path, fresh: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert run(spec_of(folder), update=True) is ExitCode.OK
    check_new(folder, fresh)
