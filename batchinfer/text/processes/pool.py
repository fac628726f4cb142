"""Makes prompts in worker processes; a row that kills its worker becomes an error."""

from __future__ import annotations

import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from batchinfer.errors import RowError
from batchinfer.process.cpus import available_cpus
from batchinfer.text.images.image_placeholders import ImageSettings
from batchinfer.text.processes.limits import Limits
from batchinfer.text.processes.server_process import ServerProcess, StoppedError, not_started
from batchinfer.text.processes.worker import BuilderFactory, Result
from batchinfer.text.processes.workers import Workers
from batchinfer.text.row_values import MAX_ROW_BYTES, require_size
from batchinfer.text.tokenizer import Tokenizer

MAX_WORKERS = 16
"""Maximum number of workers. The parent cannot send rows fast enough to keep more workers busy."""
_BATCHES_PER_WORKER = 2
"""Number of batches per worker in a call, so that no worker waits long for another worker's last
batch."""
_LIMITS = Limits()

_MIN_ROWS, _MAX_ROWS = 8, 256
"""Minimum and maximum number of rows in a batch. Small batches let workers share the work
evenly."""
_MAX_BYTES = 1 << 17

_Pending = Sequence[tuple["Batch", "Future[list[Result]]"]]


class TextProcesses:
    """Worker processes that make prompts with one tokenizer. Thread-safe.

    The fork server starts at once, and workers start when there is work. After an interrupt, after
    the server's death, and in a process forked from this process, unfinished calls fail and the
    next call starts a new server.

    Args:
        most: initial maximum number of workers, by default the number of cores that this process
            may use.
    """

    def __init__(self, most: int | None = None, limits: Limits = _LIMITS) -> None:
        self._limits = limits
        self._tokenizer: Tokenizer | None = None
        self._prepare: Callable[[], object] | None = None
        self._lock = threading.Lock()
        self._is_stopped = False
        self._start(most or min(available_cpus(), MAX_WORKERS))

    def load(self, tokenizer: Tokenizer, images: ImageSettings | None = None) -> None:
        """Send workers their tokenizer; call it once, before any other method.

        Args:
            images: settings of the images that workers prepare; None if there are none.

        Raises:
            DeviceError: worker processes cannot be started.
        """
        self._tokenizer = tokenizer
        if images is not None:
            self._prepare = images.prepare
            self._limits = self._limits.for_images(images.max_pixels)
            self._server.limits = self._workers.limits = self._limits
        self._server.load(tokenizer, self._prepare)

    def prompts(self, factory: BuilderFactory) -> WorkerPrompts:
        """Return an object that makes prompts in workers, with the factory's builder.

        Raises:
            JobError: from the factory.
            ModelError: making the builder exceeds a worker's limits, because of its chat template.
            DeviceError: worker processes cannot be started.
        """
        pickled = pickle.dumps(factory, pickle.HIGHEST_PROTOCOL)
        self._restart_if_dead()
        columns = self._threads.submit(self._workers.columns, pickled).result()
        return WorkerPrompts(self, pickled, columns)

    def start(
        self, factory: bytes, rows: Sequence[Mapping[str, object]]
    ) -> Callable[[], list[Result]]:
        """Start making prompts.

        Returns:
            A function that waits and returns a prompt or an error for each row, in order. The
            function raises ``DeviceError``, and ``StoppedError`` after a call to ``stop``.

        Raises:
            DeviceError: no worker process could be started.
        """
        self._restart_if_dead()
        results: list[Result | None] = [None] * len(rows)
        batches = make_batches(rows, results, _BATCHES_PER_WORKER * self._workers.most)
        pending = [
            (batch, self._threads.submit(self._workers.results, factory, batch.rows))
            for batch in batches
        ]
        return partial(self._gather, results, pending, os.getpid())

    def stop(self) -> None:
        """Interrupt threads that wait for prompts; they raise ``StoppedError``."""
        self._is_stopped = True
        self._server.close()

    def check_stopped(self) -> None:
        if self._is_stopped:
            raise StoppedError

    def close(self) -> None:
        self.stop()
        self._release()

    def _start(self, most: int) -> None:
        self._owner = os.getpid()
        self._server = ServerProcess(self._limits)
        self._workers = Workers(self._server, self._limits, most)
        self._threads = ThreadPoolExecutor(most, "prompts")
        self._release = weakref.finalize(self, _release, self._server, self._workers, self._threads)
        if self._tokenizer is not None:
            self._server.load(self._tokenizer, self._prepare)

    def _restart_if_dead(self) -> None:
        if self._owner != os.getpid():
            # A new lock, because another thread may have held the old lock at the fork.
            self._lock = threading.Lock()
        with self._lock:
            self.check_stopped()
            if self._server.has_failed or self._owner != os.getpid():
                self._release()
                self._start(self._workers.most)

    def _gather(self, results: list[Result | None], pending: _Pending, owner: int) -> list[Result]:
        if owner != os.getpid():
            raise not_started("this process was forked from the process that started the call")
        try:
            for batch, future in pending:
                for index, result in zip(batch.indices, future.result(), strict=True):
                    results[index] = result
        except CancelledError:
            raise StoppedError from None
        except Exception:
            for _, future in pending:
                future.cancel()
            raise
        except BaseException:  # do not wait for rows, which may run for minutes
            self._server.close("it was interrupted")
            raise
        return [result for result in results if result is not None]


def _release(server: ServerProcess, workers: Workers, threads: ThreadPoolExecutor) -> None:
    server.close()
    if server.owner == os.getpid():  # in a forked process, the threads that hold locks do not exist
        workers.close()
        threads.shutdown(wait=False, cancel_futures=True)


class WorkerPrompts:
    """Makes prompts of rows in workers (see ``batchinfer.text.prompts.PromptBuilder``)."""

    def __init__(self, processes: TextProcesses, factory: bytes, columns: tuple[str, ...]) -> None:
        self.columns = columns
        self._processes = processes
        self._factory = factory

    def build(self, rows: Sequence[Mapping[str, object]]) -> list[Result]:
        """Return a prompt or an error for each row, in order.

        Error codes: the builder's codes; ``template_error`` or ``tokenizer_error`` for a row that
        killed its worker; ``row_too_large``.

        Raises:
            StoppedError: ``TextProcesses.stop`` was called.
            DeviceError: no worker process could be started.
        """
        return self.start(rows)()

    def start(self, rows: Sequence[Mapping[str, object]]) -> Callable[[], list[Result]]:
        """Start ``build``; the returned function waits, and returns or raises like ``build``."""
        needed = [{name: row[name] for name in self.columns if name in row} for row in rows]
        return self._processes.start(self._factory, needed)


@dataclass
class Batch:
    """Rows for one message to a worker."""

    indices: list[int] = field(default_factory=list)
    """Indices of the rows in the call."""
    rows: list[bytes] = field(default_factory=list)
    """The rows, each pickled separately."""
    num_bytes: int = 0


def make_batches(
    rows: Sequence[Mapping[str, object]], results: list[Result | None], num_batches: int
) -> Iterator[Batch]:
    """Split rows into about ``num_batches`` batches of at most 256 rows and 128 KiB.

    A row that cannot be sent is in no batch; its error is stored in ``results`` at its index.
    """
    most_rows = min(max(_MIN_ROWS, -(-len(rows) // num_batches)), _MAX_ROWS)
    batch = Batch()
    for index, row in enumerate(rows):
        try:
            data = _pickled(row)
        except RowError as error:
            results[index] = error
            continue
        is_full = len(batch.rows) == most_rows or batch.num_bytes + len(data) > _MAX_BYTES
        if batch.rows and is_full:
            yield batch
            batch = Batch()
        batch.indices.append(index)
        batch.rows.append(data)
        batch.num_bytes += len(data)
    if batch.rows:
        yield batch


def _pickled(row: Mapping[str, object]) -> bytes:
    for name, value in row.items():
        require_size(value, name)
    try:
        data = pickle.dumps(row, pickle.HIGHEST_PROTOCOL)
    except (RecursionError, pickle.PicklingError, TypeError, AttributeError) as error:
        reason = f"a value that cannot be sent to another process: {error}"
        raise RowError("unsupported_content", reason) from error
    if len(data) > MAX_ROW_BYTES:
        raise RowError("row_too_large", f"its columns hold more than {MAX_ROW_BYTES} bytes")
    return data
