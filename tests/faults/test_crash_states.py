"""The commit protocol over files that lose, tear and reorder what was not synced."""

from __future__ import annotations

import hashlib
from pathlib import Path
from random import Random

import pytest

from batchinfer.job.claims import swap_generation
from batchinfer.job.output import commit
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.storage.filesystem import Files
from tests.faults import updates
from tests.faults.lossy_files import LossyFiles, NeverSynced
from tests.faults.protocol import PLAN, Job
from tests.faults.states import count_violations
from tests.faults.updates import count_update_violations

STATES = 300  # among them states of going on after a crash, and of running error rows again
FEW = 40


@pytest.mark.parametrize(
    ("states", "seed"), [(2 * FEW, 2), pytest.param(STATES, 1, marks=pytest.mark.long)]
)
def test_nothing_promised_is_lost(states: int, seed: int) -> None:
    assert count_violations(LossyFiles, states, seed) == {"states": states, "wrong": 0}


def test_an_update_leaves_one_generation_whole_or_says_so() -> None:
    assert count_update_violations(LossyFiles, FEW, seed=1) == {"states": FEW, "wrong": 0}


def test_the_check_of_updates_sees_it_when_nothing_is_synced() -> None:
    assert count_update_violations(NeverSynced, FEW, seed=1)["wrong"] > 10


def test_the_check_of_updates_sees_a_swap_that_is_not_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def finish_first(out: OutputDir, generation: OutputDir) -> None:
        swap_generation._place(out, generation)
        put_in_place(out, generation)

    put_in_place = updates.put_in_place
    monkeypatch.setattr(updates, "put_in_place", finish_first)
    assert count_update_violations(LossyFiles, FEW, seed=1)["wrong"] > 5


def test_the_check_sees_it_when_nothing_is_synced() -> None:
    assert count_violations(NeverSynced, FEW, seed=1)["wrong"] > 10


@pytest.mark.parametrize("seed", [7, 13])
def test_a_state_that_no_run_gets_on_from_is_counted_and_the_others_are_tried(seed: int) -> None:
    assert count_violations(NeverSynced, FEW, seed)["states"] == FEW


def test_the_check_sees_it_when_names_are_not_synced() -> None:
    class NamesNotSynced(LossyFiles):
        def sync(self, path: Path) -> None:
            if path.suffix:
                super().sync(path)

    assert count_violations(NamesNotSynced, FEW, seed=1)["wrong"] > 10


def test_the_check_sees_a_part_that_is_on_disk_only_after_its_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rename_only(at: Files, staged: Path, final: Path) -> None:
        at.rename(staged, final)

    monkeypatch.setattr(commit, "publish_file", rename_only)
    assert count_violations(LossyFiles, FEW, seed=1)["wrong"] > 5


def test_files_in_memory_keep_what_was_synced_and_may_lose_the_rest() -> None:
    def found(at: LossyFiles, path: Path) -> bytes | None:
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
    contents = {found(at, path) for at in after}
    assert {b"first", b"second", b"sec", b"sec\0\0\0"} <= contents
    assert None not in contents
    assert {found(at, Path("/out/y")) for at in after} >= {None, b"z", b""}


def test_a_run_over_files_in_memory_writes_what_a_run_writes() -> None:
    job = Job(LossyFiles(), Random(1))
    job.run()
    job.check_finished()
    part = PLAN.parts()[0]
    record = job.out.finished(part)
    assert record is not None
    data = job.files.open(job.out.part_file(part)).read()
    assert record.sha256 == hashlib.sha256(data).hexdigest()
