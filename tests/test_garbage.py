"""What exists when a run begins is left alone by the collector until the run ends."""

from __future__ import annotations

import gc

import pytest

from batchinfer.garbage import long_lived_left_alone


def fails_inside() -> None:
    with long_lived_left_alone():
        assert gc.get_freeze_count() > 0
        raise KeyboardInterrupt


def test_collections_see_everything_again_however_the_run_ends() -> None:
    assert gc.get_freeze_count() == 0
    with pytest.raises(KeyboardInterrupt):
        fails_inside()
    assert gc.get_freeze_count() == 0
