"""Threads that make items for the engine's loop, consume its results, or repeat an action."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, Full, Queue
from threading import Event, Semaphore
from typing import Generic, Self, TypeVar

T = TypeVar("T")
_POLL_S = 0.1


class Prefetcher(Generic[T]):
    """Iterates in a thread, at most ``depth`` items ahead of the consumer.

    Args:
        starved: event that is set while the consumer finds no item, so that ``items`` can yield
            the next item sooner.
    """

    def __init__(self, items: Iterable[T], depth: int, starved: Event | None = None) -> None:
        self._queue: Queue[T] = Queue()
        self._room = Semaphore(depth)
        """Number of items that may still be made before the consumer has to take one."""
        self._starved = starved or Event()
        self._closed = Event()
        self._done = Event()
        self._filled = Event()
        """Set once there is a first item, or ``items`` has ended."""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(items,), daemon=True)
        self._thread.start()

    def take(self, timeout_s: float) -> T | None:
        """Return the next item; None if no item comes in time or no item is left.

        Raises:
            BaseException: the iterable's error, once all earlier items are taken and the consumer
                waits for more (``timeout_s`` over 0).
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
            if waits and self._is_drained and self._error is not None:
                raise self._error from None
            return None

    def items(self, is_over: Callable[[], bool]) -> Iterator[T]:
        """Yield all items; end early if ``is_over`` returns True. Raise the iterable's error."""
        while not self.exhausted and not is_over():
            if (item := self.take(_POLL_S)) is not None:
                yield item

    def wait(self, stop: Event) -> None:
        """Wait for the first item, or the end of the iterable, or ``stop``."""
        while self._queue.empty() and not self._done.is_set() and not stop.is_set():
            self._starved.set()
            self._filled.wait(_POLL_S)

    @property
    def exhausted(self) -> bool:
        """True if the iterable ended without an error and all its items are taken."""
        return self._is_drained and self._error is None

    @property
    def _is_drained(self) -> bool:
        return self._done.is_set() and self._queue.empty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread and wait for it; drop the remaining items."""
        self._closed.set()
        self._thread.join()

    def _run(self, items: Iterable[T]) -> None:
        try:
            coming = iter(items)
            while self._has_room():
                # A variable would keep the item alive after the consumer has dropped it.
                self._queue.put(next(coming))
                self._filled.set()
        except StopIteration:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()
            self._filled.set()

    def _has_room(self) -> bool:
        """Wait until another item may be made; return False once no more items are wanted."""
        while not self._closed.is_set():
            if self._room.acquire(timeout=_POLL_S):
                return True
        return False


class Repeater:
    """Calls ``action`` in a thread every ``every_s`` seconds, first after ``every_s`` seconds."""

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
    """Calls ``consume`` on each item in a thread; ``put`` waits while the queue is full."""

    def __init__(self, consume: Callable[[T], None], depth: int) -> None:
        self._consume = consume
        self._queue: Queue[T | None] = Queue(depth)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Add an item. Raise the error of ``consume`` for an earlier item, if any."""
        self._offer(item)
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Consume the remaining items and end the thread; raise the error of ``consume``.

        An error that was raised inside the context takes precedence.
        """
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
