"""The right to write to a store that a lock's holder lends to others."""

from __future__ import annotations

import time
from collections.abc import Callable

from batchinfer.console.format import printable
from batchinfer.errors import LockedError
from batchinfer.job.storage.object_store import Objects
from batchinfer.job.storage.urls import StorePath

TRUSTED_S = 20.0
"""How long what the store has said of a permit holds."""


class Permit:
    """An object whose text nobody can guess, there for as long as its lender holds the lock.

    Who writes by a permit writes to names that are its own alone: what it had sent off before the
    permit went takes the place of nothing.

    Args:
        path: the object.
        text: what it holds.
        clock: seconds.
    """

    def __init__(
        self,
        objects: Objects,
        path: StorePath,
        text: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects = objects
        self._path = path
        self._text = text
        self._clock = clock
        self._trusted_until = -1.0

    def check(self) -> None:
        """Make sure that the permit holds, by what the store said a short while ago.

        Raises:
            LockedError: it does not.
            StorageError: the store does not answer.
        """
        if self._clock() >= self._trusted_until:
            self.confirm()

    def confirm(self) -> None:
        """Make sure that the permit holds: ask the store.

        Raises:
            LockedError: it does not.
            StorageError: the store does not answer.
        """
        asked_at = self._clock()
        try:
            found, _ = self._objects.get(self._path)
        except FileNotFoundError:
            found = b""
        if found != self._text:
            self._trusted_until = -1.0
            raise LockedError(
                f"the run that let this process write to {printable(str(self._path.parent))} has "
                "ended, or another has taken over",
            )
        self._trusted_until = asked_at + TRUSTED_S
