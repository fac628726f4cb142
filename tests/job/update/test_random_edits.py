"""After random edits, an update writes the bytes of a fresh run, and runs only new rows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.job.reuse.reuse import NOT_FOUND, KeyIndex
from tests.faults.random_edits import update_at_random
from tests.faults.violation import ViolationError


def check_update(random: Random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        update_at_random(Path(folder), random, rounds=2)


edits = given(random=st.randoms(use_true_random=False))  # so that failing edits are minimized
test_an_update_is_as_a_fresh_run = settings(max_examples=2)(edits(check_update))
test_updates_are_as_fresh_runs = pytest.mark.long(settings(max_examples=12)(edits(check_update)))


def test_random_edits_notice_rows_that_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = KeyIndex.find

    def forget(self: KeyIndex, keys: list[bytes | None]) -> object:
        files, row_ids = find(self, keys)
        files[-1:] = NOT_FOUND
        return files, row_ids

    monkeypatch.setattr(KeyIndex, "find", forget)
    with pytest.raises(ViolationError, match="ran, but the new keys are"):
        update_at_random(tmp_path, Random(1), rounds=4)


def test_random_edits_notice_answers_of_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = KeyIndex.find

    def mix_up(self: KeyIndex, keys: list[bytes | None]) -> object:
        files, row_ids = find(self, keys)
        return files[::-1], row_ids[::-1]

    monkeypatch.setattr(KeyIndex, "find", mix_up)
    with pytest.raises(ViolationError):
        update_at_random(tmp_path, Random(1), rounds=4)
