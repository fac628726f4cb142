"""What exists when a run begins is left alone by the collector until the run ends."""

from __future__ import annotations

import gc

import pytest

from batchinfer.process.process import gc_frozen, gc_paused


def fails_inside() -> None:
    with gc_frozen():
        assert gc.get_freeze_count() > 0
        raise KeyboardInterrupt


def test_what_a_caller_has_frozen_stays_frozen() -> None:
    """Not counted: what another thread lets go meanwhile leaves the frozen ones too."""
    gc.freeze()
    try:
        made_after: list[list[int]] = [[]]
        with gc_frozen():
            assert any(thing is made_after for thing in gc.get_objects())
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_collections_see_everything_again_however_the_run_ends() -> None:
    assert gc.get_freeze_count() == 0
    with pytest.raises(KeyboardInterrupt):
        fails_inside()
    assert gc.get_freeze_count() == 0


def fails_while_put_off() -> None:
    with gc_paused():
        assert not gc.isenabled()
        raise KeyboardInterrupt


def test_what_is_put_off_is_taken_up_again() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        fails_while_put_off()
    assert gc.isenabled()


def test_who_has_switched_collections_off_keeps_them_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_made_meanwhile_is_not_walked_by_the_next_collection() -> None:
    with gc_paused():
        made = [[i] for i in range(10_000)]
    young = {id(thing) for generation in (0, 1) for thing in gc.get_objects(generation)}
    assert not young & {id(thing) for thing in made}
    assert gc.get_freeze_count() == 0
