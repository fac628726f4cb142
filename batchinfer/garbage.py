"""Python's garbage collector during a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def long_lived_left_alone() -> Iterator[None]:
    """Inside, collections do not look at what exists already.

    A full one walks every object of torch, transformers and the model: a quarter of a second, in
    the middle of a run. Nothing is lost: afterwards collections look at everything again. Where a
    caller has frozen objects already, all stays as it is: they could not be told apart later.
    """
    is_ours = not gc.get_freeze_count()
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


@contextmanager
def put_off() -> Iterator[None]:
    """Inside, nothing is collected.

    Importing torch and transformers and loading a model makes a million objects that all stay: to
    look at them again and again takes a fifth of the time of a start.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            _make_old()
            gc.enable()


def _make_old() -> None:
    """Let what exists pass for what has survived collections: else the next one walks it all."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
