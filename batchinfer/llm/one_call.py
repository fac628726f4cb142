"""One call at a time: an engine has one queue and one pool, whoever calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class OneCall:
    """Lets calls in one after another, from whatever thread they come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._caller: int | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Wait for the call that runs, then keep others waiting.

        Raises:
            RuntimeError: the call that runs is this thread's own, so that it would wait for ever.
        """
        thread = threading.get_ident()
        if self._caller == thread:
            raise RuntimeError(
                f"{name} is called from within another call of the same LLM "
                "(a signal handler or a callback); call it when that one has returned"
            )
        with self._lock:
            self._caller = thread
            try:
                yield
            finally:
                self._caller = None
