"""After random edits, an update writes the same bytes as a fresh run, and runs only new rows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faults.random_edits import update_at_random


def check_update(random: Random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        update_at_random(Path(folder), random, rounds=2)


edits = given(random=st.randoms(use_true_random=False))  # so that failing edits are minimized
test_an_update_is_as_a_fresh_run = settings(max_examples=2)(edits(check_update))
test_updates_are_as_fresh_runs = pytest.mark.long(settings(max_examples=12)(edits(check_update)))
