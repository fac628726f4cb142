"""Lends the workers of one fork server to threads, and finds the rows that kill workers.

A row is blamed for a worker's death only if nothing else can be the cause: the row took too much
processor time, or it was the worker's first row. Otherwise the row runs again in a new worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Condition
from typing import Any

from batchinfer.errors import ModelError, RowError
from batchinfer.text.images.files import INVALID_IMAGE
from batchinfer.text.images.shared_arrays import SharedArrays
from batchinfer.text.processes.deaths import Death, death
from batchinfer.text.processes.limits import Limits
from batchinfer.text.processes.server_process import ForkRefusedError, ServerProcess, not_started
from batchinfer.text.processes.worker import Result

_MAX_OUTSIDE = 4
"""If causes outside the process kill this many workers for one row, the call fails, because this
machine cannot run workers."""


@dataclass(eq=False)
class _Worker:
    pid: int
    connection: Connection
    has_worked: bool = False
    is_dead: bool = False
    has_rendered: bool = False
    """True once the worker's single row is rendered; only the tokenizer can then fail."""


class Workers:
    """The workers of a fork server. Thread-safe: each thread uses its own worker.

    Args:
        most: maximum number of workers. The number is halved when the system kills a worker or
            keeps a worker from computing, because the machine then has too little memory or too
            many processes.
    """

    def __init__(self, server: ServerProcess, limits: Limits, most: int) -> None:
        self.most = most
        self._server = server
        self.limits = limits
        self._idle: list[_Worker] = []
        self._num_lent = 0
        self._changed = Condition()

    def close(self) -> None:
        """Close the connections of idle workers."""
        with self._changed:
            for worker in self._idle:
                worker.connection.close()
            self._idle.clear()

    def columns(self, factory: bytes) -> tuple[str, ...]:
        """Return the input columns that a factory's builder needs.

        Raises:
            JobError: from the factory.
            ModelError: making the builder exceeds a worker's limits, because of its chat template.
            DeviceError, StoppedError: from ``ServerProcess.fork``.
        """
        answer = self._alone(factory, [])
        if isinstance(answer, RowError):
            raise ModelError(f"the model's chat template cannot be compiled: {answer}")
        return tuple(answer)

    def results(self, factory: bytes, rows: Sequence[bytes]) -> list[Result]:
        """Return a prompt or an error for each row, in order.

        A batch that kills its worker or takes too long runs again row by row.

        Raises:
            DeviceError, StoppedError: from ``ServerProcess.fork``.
        """
        if len(rows) > 1:
            with self._lent() as worker:
                answer = self._ask(worker, factory, rows, self.limits.seconds)
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
        """Send at most one row; return the answer, or the error of a row that kills workers."""
        seconds, num_outside, needs_new = self.limits.seconds, 0, False
        while True:
            with self._lent(needs_new) as worker:
                is_first = not worker.has_worked
                answer = self._ask(worker, factory, rows, seconds)
            if not isinstance(answer, Death):
                return answer
            is_hasty = answer.is_out_of_time and seconds < self.limits.patient_seconds
            if answer.outside is not None:
                num_outside += 1
                if num_outside == _MAX_OUTSIDE:
                    raise not_started(
                        f"{answer.outside}; this happened {_MAX_OUTSIDE} times for one row"
                    )
            elif not is_hasty and (answer.is_certain or is_first):
                if answer.is_of_image:
                    return RowError(
                        INVALID_IMAGE,
                        f"preparing an image {answer.predicate}; make the picture smaller",
                    )
                if worker.has_rendered:
                    return RowError("tokenizer_error", f"the tokenizer {answer.predicate}")
                return RowError("template_error", f"the template {answer.predicate}")
            if is_hasty:
                seconds = self.limits.patient_seconds
            needs_new = True

    def _ask(self, worker: _Worker, factory: bytes, rows: Sequence[bytes], seconds: float) -> Any:
        """Send a request to a worker; return its answer, or the cause of its death."""
        worker.has_worked, worker.has_rendered = True, False
        kind, values = "", []
        try:
            worker.connection.send((factory, rows, seconds))
            kind, *values = worker.connection.recv()
            if kind == "rendered":
                worker.has_rendered = True
                kind, *values = worker.connection.recv()
            if kind == "results":
                for result in values[0]:
                    if isinstance(result, SharedArrays):
                        result.receive(worker.connection)
        except (EOFError, OSError, RuntimeError):  # RuntimeError: no file arrived
            kind = ""
        if kind == "refused":
            raise values[0]
        if kind in ("columns", "results"):
            return values[0]
        worker.is_dead = True
        worker.connection.close()
        end = self._server.end(worker.pid)
        cause_of_death = death(
            self.limits, seconds, end, tuple(values) if kind == "failed" else None
        )
        if cause_of_death.is_bug:
            raise RuntimeError(f"in a child process: {cause_of_death.predicate}")
        if cause_of_death.outside is not None:
            self._halve()
        return cause_of_death

    @contextmanager
    def _lent(self, needs_new: bool = False) -> Iterator[_Worker]:
        """Wait for a worker, and lend it to this thread."""
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
        with self._changed:
            self.most = max(
                1, self._num_living // 2
            )  # the count includes the dead worker, which is still lent

    def _end_surplus(self, most: int) -> None:
        """End idle workers until at most ``most`` workers are alive."""
        while self._idle and self._num_living > most:
            worker = self._idle.pop(0)
            worker.connection.close()
            self._server.end(worker.pid)
