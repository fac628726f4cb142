"""The commit protocol on files that may lose, tear or reorder unsynced data."""

from __future__ import annotations

import hashlib
from pathlib import Path
from random import Random

import pytest

from batchinfer.job.claims import swap_generation
from batchinfer.job.output import commit
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.storage.filesystem import Files
from tests.faults.crash_states import check_crash_states
from tests.faults.lossy_files import LossyFiles, NeverSynced
from tests.faults.protocol import PLAN, Job
from tests.faults.violation import ViolationError

FEW = 60


class NamesNotSynced(LossyFiles):
    def sync(self, path: Path) -> None:
        if path.suffix:
            super().sync(path)


@pytest.mark.parametrize("examples", [FEW, pytest.param(300, marks=pytest.mark.long)])
def test_power_failures_lose_no_row_that_was_on_disk(examples: int) -> None:
    assert check_crash_states(examples, examples) > examples
    assert check_crash_states(examples // 2, examples, of_updates=True) > examples // 2


@pytest.mark.parametrize("files_type", [NeverSynced, NamesNotSynced])
def test_crash_states_fail_if_data_or_names_are_not_synced(files_type: type[LossyFiles]) -> None:
    with pytest.raises(ViolationError):
        check_crash_states(FEW, 1, files_type)


def test_crash_states_fail_if_a_part_is_not_synced_before_its_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rename_only(at: Files, staged: Path, final: Path) -> None:
        at.rename(staged, final)

    monkeypatch.setattr(commit, "publish_file", rename_only)
    with pytest.raises(ViolationError):
        check_crash_states(FEW, 1)


def test_crash_states_fail_if_an_update_swaps_files_before_it_records_the_swap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def swap_first(out: OutputDir, generation: OutputDir) -> None:
        swap_generation._place(out, generation)
        put_in_place(out, generation)

    put_in_place = swap_generation.put_in_place
    monkeypatch.setattr(swap_generation, "put_in_place", swap_first)
    with pytest.raises(ViolationError):
        check_crash_states(FEW, 1, of_updates=True)


def test_lossy_files_keep_synced_data_and_may_lose_the_rest() -> None:
    def content(at: LossyFiles, path: Path) -> bytes | None:
        return None if at.stat(path) is None else at.open(path).read()

    memory, path = LossyFiles(), Path("/out/x")
    memory.make_directory(path.parent)
    memory.write(path, b"first")
    memory.sync(path)
    memory.sync(path.parent)
    memory.write(path, b"second")
    memory.write(Path("/out/y"), b"z")
    random = Random(1)
    after = [memory.after_power_loss(random) for _ in range(200)]
    contents = {content(at, path) for at in after}
    assert {b"first", b"second", b"sec", b"sec\0\0\0"} <= contents
    assert None not in contents
    assert {content(at, Path("/out/y")) for at in after} >= {None, b"z", b""}


def test_job_over_lossy_files_writes_parts_and_records() -> None:
    job = Job(LossyFiles(), Random(1))
    job.run()
    job.check_finished()
    part = PLAN.parts()[0]
    record = job.out.finished(part)
    data = job.files.open(job.out.part_file(part)).read()
    assert record.sha256 == hashlib.sha256(data).hexdigest()
