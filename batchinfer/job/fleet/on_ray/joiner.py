"""A process that joins a Ray cluster, begun and ended, and the way to it.

It imports Ray for half a second before it takes its first message. It can be begun before there is
anything to say: nothing is imported here that takes time.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from socket import SHUT_RDWR, socket
from tempfile import TemporaryFile
from threading import Thread
from typing import IO, Any

END_S = 4.0
"""How long Ray has to end by itself: where its daemons are dead, it takes its time."""
_LEAVE = pickle.dumps(None, pickle.HIGHEST_PROTOCOL)


class Joiner:
    """The process that has joined a cluster, and the way to it.

    A thread writes what is sent: who sends to a process that does not read would wait without end.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], connection: Connection, said: IO[bytes]
    ) -> None:
        self.process = process
        self.said = said
        self._connection = connection
        self._outgoing: SimpleQueue[bytes] = SimpleQueue()
        self._asked_at: float | None = None
        """Since when it has owed an answer."""
        self._writer = Thread(target=self._write, daemon=True)
        self._writer.start()

    def send(self, message: object) -> None:
        """Send a message; that nobody takes it is seen where an answer is waited for."""
        self._outgoing.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def ask(self, message: object) -> None:
        """Send what is answered, unless an answer is still to come."""
        if self._asked_at is None:
            self.send(message)
            self._asked_at = time.monotonic()

    def answer(self, timeout_s: float) -> Any:
        """The answer; None where it does not come in time.

        Raises:
            EOFError, OSError: the process has ended.
        """
        if not self._connection.poll(timeout_s):
            return None
        answer, self._asked_at = self._connection.recv(), None
        return answer

    @property
    def silent_s(self) -> float:
        """How long it has owed an answer."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def last_words(self) -> str:
        """How it has ended, on one line; killed where it has not."""
        code = self._ended(END_S)
        self.said.seek(0)
        lines = self.said.read().decode(errors="replace").strip().splitlines()
        why = f": {lines[-1][:300]}" if lines else ""
        return f"its process ended with {code}{why}"

    def end(self, within_s: float) -> None:
        """Have it leave the cluster; kill it where that takes longer. It may have ended before."""
        until = time.monotonic() + within_s
        self._outgoing.put(_LEAVE)
        with suppress(EOFError, OSError):  # what it still says, until it closes its end
            while self._connection.poll(max(0.0, until - time.monotonic())):
                self._connection.recv()
        self._ended(max(0.0, until - time.monotonic()))
        with suppress(OSError), socket(fileno=os.dup(self._connection.fileno())) as way:
            way.shutdown(SHUT_RDWR)  # what is still to be written is for nobody
        self._writer.join()
        self._connection.close()
        self.said.close()

    def _ended(self, within_s: float) -> int:
        """Wait for its end, and kill it where that takes longer; its exit status."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
        self.process.kill()
        return self.process.wait()

    def _write(self) -> None:
        with suppress(OSError):  # it has ended
            while (message := self._outgoing.get()) != _LEAVE:
                self._connection.send_bytes(message)
            self._connection.send_bytes(_LEAVE)


def is_installed() -> bool:
    """Whether Ray is there to be imported."""
    return find_spec("ray") is not None


def begun() -> Joiner:
    """A process that waits to be told what to join."""
    ours, theirs = Pipe()
    said = TemporaryFile()  # noqa: SIM115 - closed with the process
    program = (
        "-P",
        "-m",
        "batchinfer.job.fleet.on_ray.ray_main",
        str(theirs.fileno()),
        str(os.getpid()),
    )
    process = subprocess.Popen(
        [sys.executable, *program],
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=said,
        pass_fds=(theirs.fileno(),),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C is for the driver
    )
    theirs.close()
    return Joiner(process, ours, said)


@contextmanager
def begun_ahead() -> Iterator[Joiner | None]:
    """One that comes up while its job is looked at; it ends with this if nothing else ended it.

    None where Ray is not installed, which whoever needs it will say.
    """
    process = begun() if is_installed() else None
    try:
        yield process
    finally:
        if process is not None:
            process.end(0.0)
