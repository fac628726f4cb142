"""Runs workers as plain processes on this machine."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from tempfile import TemporaryFile
from threading import Thread
from typing import Any, Protocol

from batchinfer.job.fleet.worker_process import WorkerSetup


class WorkerHandle(Protocol):
    """A worker's process, wherever it runs."""

    def poll(self) -> tuple[list[dict[str, Any]], int | None]:
        """Return new messages and the exit code: negative for a signal, None while it runs."""
        ...

    def send(self, line: str) -> None: ...

    def stop(self) -> None:
        """Ask the worker to write everything to disk and end."""
        ...

    def kill(self) -> None: ...

    def last_line(self) -> str:
        """Return the last line that the worker wrote to stderr."""
        ...


class LocalWorker:
    """A worker's process on this machine.

    Args:
        cores: CPU cores that the process may use; empty for all.
        environment: environment variables for the worker, in addition to those of this process.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        cores: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._stderr = TemporaryFile()  # noqa: SIM115 - closed with the process
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "batchinfer.job.fleet.worker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            start_new_session=True,  # Ctrl-C must reach only the launcher
        )
        if cores:
            os.sched_setaffinity(self._process.pid, cores)
        self._messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        self._write(pickle.dumps(setup))

    def poll(self) -> tuple[list[dict[str, Any]], int | None]:
        code = self._process.poll()
        if code is not None:
            self._reader.join()
        messages = []
        while not self._messages.empty():
            messages.append(self._messages.get())
        return messages, code

    def send(self, line: str) -> None:
        self._write(line.encode() + b"\n")

    def stop(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for file in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert file is not None
                file.close()
        self._stderr.close()

    def last_line(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # the worker process may have ended
            assert self._process.stdin is not None
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):  # the process died while it wrote the line
                self._messages.put(json.loads(line))
