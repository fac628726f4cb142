"""A child, as the process sees it that asks it."""

from __future__ import annotations

import pickle
import socket
from contextlib import suppress
from typing import Any

from batchinfer.text.children import messages


class ChildProcess:
    """A child that is spoken to. Nothing here waits for it."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.pid = pid
        self.said: tuple[str, str] | None = None
        """Cause and text of its last message, ``failed``."""
        self.fileno = connection.fileno
        self.close = connection.close
        self._connection = connection
        self._inbox = messages.Inbox()
        self._outbox = b""
        self._num_sent = 0

    def ask(self, *request: object) -> None:
        """Send a request, as far as the child reads it now."""
        self._outbox = self._outbox[self._num_sent :] + messages.framed(request)
        self._num_sent = 0
        self.send_more()

    @property
    def has_more_to_send(self) -> bool:
        """Whether requests wait to be read."""
        return self._num_sent < len(self._outbox)

    def send_more(self) -> None:
        """Send what waits to be read; of a child that is dead, ``answers`` will tell."""
        with suppress(OSError), memoryview(self._outbox) as outbox:
            while self.has_more_to_send:
                self._num_sent += self._connection.send(outbox[self._num_sent :])

    def answers(self) -> list[tuple[Any, ...]] | None:
        """The answers that can be read now; None where there will be no more: it is dead."""
        try:
            answers = self._inbox.take_from(self._connection)
        except EOFError:
            return None
        except pickle.UnpicklingError as error:
            self.said = "forged", str(error)  # it lives, and is to be killed for that
            return None
        if answers and answers[-1][0] == "failed":
            _, cause, text = answers.pop()
            self.said = cause, text
        return answers
