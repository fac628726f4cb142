"""The workers of one fork server: lends them to threads, and finds the row that one dies of.

A row is to blame for a worker's death if nothing else can be: if it took too much processor time,
or if the worker had done nothing before. Else the row runs again, in a new worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Condition
from typing import Any

from batchinfer.errors import ModelError, RowError
from batchinfer.text.processes.deaths import Death, death
from batchinfer.text.processes.limits import Limits
from batchinfer.text.processes.server_process import ForkRefusedError, ServerProcess, not_started
from batchinfer.text.processes.worker import Result

_MAX_OUTSIDE = 4
"""How often something else may keep a worker from a row; then no worker can run here."""


@dataclass(eq=False)
class _Worker:
    pid: int
    connection: Connection
    has_worked: bool = False
    is_dead: bool = False
    has_rendered: bool = False
    """Whether it tokenizes its single row, or has."""


class Workers:
    """The workers of a fork server. Thread-safe: each thread speaks to a worker of its own.

    Args:
        most: workers at a time. Halved when the system kills one or keeps it from computing: the
            machine has too little memory, or too many processes, for so many.
    """

    def __init__(self, server: ServerProcess, limits: Limits, most: int) -> None:
        self.most = most
        self._server = server
        self._limits = limits
        self._idle: list[_Worker] = []
        self._num_lent = 0
        self._changed = Condition()

    def close(self) -> None:
        """Close the connections of workers whose server has ended."""
        with self._changed:
            for worker in self._idle:
                worker.connection.close()
            self._idle.clear()

    def columns(self, factory: bytes) -> tuple[str, ...]:
        """The input columns that a factory's builder needs.

        Raises:
            JobError: as the factory raises.
            ModelError: making the builder is too much for a worker: its chat template is.
            DeviceError, StoppedError: as ``ServerProcess.fork``.
        """
        answer = self._alone(factory, [])
        if isinstance(answer, RowError):
            raise ModelError(f"the model's chat template cannot be compiled: {answer}")
        return tuple(answer)

    def results(self, factory: bytes, rows: Sequence[bytes]) -> list[Result]:
        """A prompt or an error for each row, in order.

        A batch that a worker dies of, or that takes too long, runs again row by row.

        Raises:
            DeviceError, StoppedError: as ``ServerProcess.fork``.
        """
        if len(rows) > 1:
            with self._lent() as worker:
                answer = self._ask(worker, factory, rows, self._limits.seconds)
            if not isinstance(answer, Death):
                results: list[Result] = answer
                return results
        return [self._result(factory, row) for row in rows]

    def _result(self, factory: bytes, row: bytes) -> Result:
        answer = self._alone(factory, [row])
        if isinstance(answer, RowError):
            return answer
        result: Result = answer[0]
        return result

    def _alone(self, factory: bytes, rows: Sequence[bytes]) -> Any:
        """The answer about one row, or about none, or the error of a row that workers die of."""
        seconds, num_outside, needs_new = self._limits.seconds, 0, False
        while True:
            with self._lent(needs_new) as worker:
                is_first = not worker.has_worked
                answer = self._ask(worker, factory, rows, seconds)
            if not isinstance(answer, Death):
                return answer
            is_hasty = answer.is_out_of_time and seconds < self._limits.patient_seconds
            if answer.outside is not None:
                num_outside += 1
                if num_outside == _MAX_OUTSIDE:
                    raise not_started(f"{answer.outside}: {_MAX_OUTSIDE} times at one row")
            elif not is_hasty and (answer.is_certain or is_first):
                if worker.has_rendered:
                    return RowError("tokenizer_error", f"the tokenizer {answer.what}")
                return RowError("template_error", f"the template {answer.what}")
            if is_hasty:
                seconds = self._limits.patient_seconds
            needs_new = True

    def _ask(self, worker: _Worker, factory: bytes, rows: Sequence[bytes], seconds: float) -> Any:
        """A worker's answer, or its death."""
        worker.has_worked, worker.has_rendered = True, False
        kind, values = "", []
        try:
            worker.connection.send((factory, rows, seconds))
            kind, *values = worker.connection.recv()
            if kind == "rendered":
                worker.has_rendered = True
                kind, *values = worker.connection.recv()
        except (EOFError, OSError):
            kind = ""
        if kind == "refused":
            raise values[0]
        if kind in ("columns", "results"):
            return values[0]
        worker.is_dead = True
        worker.connection.close()
        end = self._server.end(worker.pid)
        died_of = death(self._limits, seconds, end, tuple(values) if kind == "failed" else None)
        if died_of.is_bug:
            raise RuntimeError(f"in a child process: {died_of.what}")
        if died_of.outside is not None:
            self._halve()
        return died_of

    @contextmanager
    def _lent(self, needs_new: bool = False) -> Iterator[_Worker]:
        """A worker for this thread alone, waited for."""
        with self._changed:
            worker = self._take(needs_new)
            self._num_lent += 1
        try:
            yield worker
        finally:
            with self._changed:
                self._num_lent -= 1
                if not worker.is_dead:
                    self._idle.append(worker)
                self._end_surplus(self.most)
                self._changed.notify_all()

    def _take(self, needs_new: bool) -> _Worker:
        while True:
            if self._idle and not needs_new:
                return self._idle.pop()
            self._end_surplus(self.most - 1)
            if self._num_living < self.most:
                try:
                    return _Worker(*self._server.fork())
                except ForkRefusedError as error:
                    if not self._num_living:
                        raise not_started(str(error)) from error
                    self.most = self._num_living
            else:
                self._changed.wait()

    @property
    def _num_living(self) -> int:
        return self._num_lent + len(self._idle)

    def _halve(self) -> None:
        """Go on with half of the workers that are left."""
        with self._changed:
            self.most = max(1, self._num_living // 2)  # the dead one is still lent

    def _end_surplus(self, most: int) -> None:
        """End idle workers until at most so many live."""
        while self._idle and self._num_living > most:
            worker = self._idle.pop(0)
            worker.connection.close()
            self._server.end(worker.pid)
