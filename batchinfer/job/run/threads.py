"""Work beside the engine's loop: an iterator that runs ahead of it, a consumer that runs behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import Empty, Full, Queue
from threading import Event, Semaphore
from typing import Generic, Self, TypeVar

T = TypeVar("T")
_POLL_S = 0.1


class Prefetcher(Generic[T]):
    """Runs an iterable in a thread, at most ``depth`` items ahead of whoever takes them: it is not
    asked for one more before one of them is taken.

    Args:
        items: what to run.
        depth: most items ahead.
        starved: kept set while whoever takes has found nothing; for ``items`` to look at.
    """

    def __init__(self, items: Iterable[T], depth: int, starved: Event | None = None) -> None:
        self._queue: Queue[T] = Queue()
        self._room = Semaphore(depth)
        """Items that may be made and not taken."""
        self._starved = starved or Event()
        self._closed = Event()
        self._done = Event()
        self._filled = Event()
        """Set once there has been an item, or there will be none."""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(items,), daemon=True)
        self._thread.start()

    def take(self, timeout_s: float) -> T | None:
        """The next item; None if there is none within the time, or ever again.

        Raises:
            BaseException: what the iterable raised, once the items before it are taken and
                somebody waits for more (``timeout_s`` over 0).
        """
        waits = timeout_s > 0
        if self._queue.empty():
            self._starved.set()
        try:
            item = self._queue.get(block=waits and not self._done.is_set(), timeout=timeout_s)
            self._starved.clear()
            self._room.release()
            return item
        except Empty:
            if waits and self._nothing_left and self._error is not None:
                raise self._error from None
            return None

    def wait(self, stop: Event) -> None:
        """Wait for an item to be there, or for the end of them all, or for ``stop``."""
        while self._queue.empty() and not self._done.is_set() and not stop.is_set():
            self._starved.set()
            self._filled.wait(_POLL_S)

    @property
    def exhausted(self) -> bool:
        """Whether every item has been taken and the iterable came to its end."""
        return self._nothing_left and self._error is None

    @property
    def _nothing_left(self) -> bool:
        return self._done.is_set() and self._queue.empty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread and wait for it; items not taken are dropped."""
        self._closed.set()
        self._thread.join()

    def _run(self, items: Iterable[T]) -> None:
        try:
            coming = iter(items)
            while self._has_room():
                self._queue.put(next(coming))  # no name for it: it is not this thread's any more
                self._filled.set()
        except StopIteration:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()
            self._filled.set()

    def _has_room(self) -> bool:
        """Wait for an item to be taken; whether another is wanted then."""
        while not self._closed.is_set():
            if self._room.acquire(timeout=_POLL_S):
                return True
        return False


class Repeater:
    """Calls ``action`` in a thread every so many seconds while it is entered, and not at once."""

    def __init__(self, action: Callable[[], None], every_s: float) -> None:
        self._action = action
        self._every_s = every_s
        self._closed = Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            self._action()


class BackgroundConsumer(Generic[T]):
    """Calls ``consume`` with each item in a thread; whoever puts waits when ``depth`` are due."""

    def __init__(self, consume: Callable[[T], None], depth: int) -> None:
        self._consume = consume
        self._queue: Queue[T | None] = Queue(depth)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Hand over an item.

        Raises:
            BaseException: what ``consume`` raised for an item before.
        """
        self._offer(item)
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Consume what is left and end the thread; raise what ``consume`` raised, if nothing is
        on its way up already."""
        self._offer(None)
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def _offer(self, item: T | None) -> None:
        while self._thread.is_alive():
            try:
                return self._queue.put(item, timeout=_POLL_S)
            except Full:
                continue

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._consume(item)
        except BaseException as error:
            self._error = error
