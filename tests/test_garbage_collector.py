"""What exists when a run begins is left alone by the collector until the run ends."""

from __future__ import annotations

import gc

import pytest

from batchinfer.process.process import gc_frozen, gc_paused


def fails_inside() -> None:
    with gc_frozen():
        assert gc.get_freeze_count() > 0
        raise KeyboardInterrupt


def test_gc_frozen_keeps_objects_of_a_caller_frozen() -> None:
    """Not counted: what another thread lets go meanwhile leaves the frozen ones too."""
    gc.freeze()
    try:
        made_after: list[list[int]] = [[]]
        with gc_frozen():
            assert any(thing is made_after for thing in gc.get_objects())
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_gc_frozen_unfreezes_after_an_error() -> None:
    assert gc.get_freeze_count() == 0
    with pytest.raises(KeyboardInterrupt):
        fails_inside()
    assert gc.get_freeze_count() == 0


def fails_while_put_off() -> None:
    with gc_paused():
        assert not gc.isenabled()
        raise KeyboardInterrupt


def test_gc_paused_enables_gc_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        fails_while_put_off()
    assert gc.isenabled()


def test_gc_paused_leaves_a_disabled_gc_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_gc_paused_moves_new_objects_to_the_oldest_generation() -> None:
    with gc_paused():
        made = [[i] for i in range(10_000)]
    young = {id(thing) for generation in (0, 1) for thing in gc.get_objects(generation)}
    assert not young & {id(thing) for thing in made}
    assert gc.get_freeze_count() == 0
