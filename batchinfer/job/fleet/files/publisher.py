"""Parts that workers have handed over, checked and put in their places."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from batchinfer.errors import DataError, StorageError
from batchinfer.job.output.commit import Draft, publish
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.part_record import PartRecord
from batchinfer.job.row_ids import Part

MOST_AT_ONCE = 4
"""Parts that are in memory, on their way through a store."""


class PartPublisher:
    """Publishes drafts in threads of its own.

    What a worker staged is read again first: between it and here are a network, a store, or another
    machine's cache.
    """

    def __init__(self, out: OutputDir) -> None:
        self._out = out
        self._pool = ThreadPoolExecutor(min(MOST_AT_ONCE, out.files.parallel_requests))
        self._running: dict[Future[PartRecord], Part] = {}

    def submit(self, part: Part, draft: Draft) -> None:
        """Have a part published."""
        self._running[self._pool.submit(_check_and_publish, self._out, part, draft)] = part

    def published(self) -> Iterator[Part]:
        """Parts that are out since this was asked last.

        Raises:
            StorageError: one could not be published, or is not as its worker staged it.
        """
        for future in [future for future in self._running if future.done()]:
            part = self._running.pop(future)
            future.result()
            yield part

    def close(self) -> None:
        """Wait until all that was submitted is out, or has failed."""
        wait(self._running)
        self._pool.shutdown()


def _check_and_publish(out: OutputDir, part: Part, draft: Draft) -> PartRecord:
    for name, sha256 in draft.sha256_of.items():
        try:
            out.check_hash(out.state / name, sha256)
        except DataError as error:
            raise StorageError(
                str(error), hint="check the disk or the store, then run again: its rows run again"
            ) from None
    return publish(out, part, draft)


def sweep(out: OutputDir) -> None:
    """Delete what workers have staged of parts that others made.

    Raises:
        StorageError: it cannot be deleted.
    """
    out.empty(out.staging)
