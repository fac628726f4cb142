"""Python's garbage collector during a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def long_lived_left_alone() -> Iterator[None]:
    """Inside, collections do not look at what exists already.

    A full one walks every object of torch, transformers and the model: a quarter of a second, in
    the middle of a run. Nothing is lost: afterwards collections look at everything again.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
