"""Silences transformers' progress bars and reports, because this package prints its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging


@contextmanager
def quiet_transformers(
    show_share: Callable[[float], None] = lambda share: None,
) -> Iterator[None]:
    """Inside the ``with`` block, make transformers log only errors, and hide its progress bars and
    FutureWarnings.

    Args:
        show_share: called with the progress, from 0 to 1, that the hidden progress bars would show.
    """
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    set_hook = getattr(logging, "set_tqdm_hook", lambda hook: None)

    def bar(make: Callable[..., Any], values: tuple[Any, ...], named: dict[str, Any]) -> Any:
        items = values[0] if values else None
        return _shared(items, show_share) if isinstance(items, Sized) else make(*values, **named)

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    before = set_hook(bar)
    try:
        with warnings.catch_warnings():
            # transformers warns about deprecated keys, which published configs still have.
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        set_hook(before)
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _shared(items: Any, show_share: Callable[[float], None]) -> Iterator[Any]:
    """Yield the items of a progress bar, and call ``show_share`` with the share of consumed
    items."""
    for done, item in enumerate(items):
        show_share(done / len(items))
        yield item
    show_share(1.0)
