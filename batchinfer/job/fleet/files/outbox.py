"""What a worker has to tell its driver, and to ask of it, until that looks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from threading import Condition

from batchinfer.job.fleet.messages import Answer, Appended, FileChange, Wanted, WorkerReport

PIECE_BYTES = 1 << 20
"""Of files in one report, or a little more."""
MOST_WAITING_BYTES = 16 << 20
"""Of files that wait for their reports; who has more to send waits as well."""

Tell = Callable[[WorkerReport], WorkerReport]


class Outbox:
    """The next reports of a worker.

    What is told goes with the next one, changes of files with as many as it takes. Nothing that is
    told after a file comes before it.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._report = WorkerReport()
        self._queue: deque[Tell | FileChange] = deque()
        """Changes of files that no report has yet, and what was told after them."""
        self._waiting_bytes = 0
        self._answer: Answer | None = None
        self._is_urgent = False

    def tell(self, change: Tell, *, urgent: bool = True) -> None:
        """Add to the next report; with ``urgent``, let the driver have it at once."""
        with self._changed:
            if self._queue:
                self._queue.append(change)
            else:
                self._report = change(self._report)
            self._wake(urgent)

    def send(self, change: FileChange, *, urgent: bool = True) -> None:
        """Have a file changed on the driver's disk; waits while much is on its way there."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting_bytes < MOST_WAITING_BYTES)
            self._waiting_bytes += len(change.data)
            self._queue.append(change)
            self._wake(urgent)

    def ask(self, wanted: Wanted) -> Answer:
        """Some bytes of a file on the driver's disk, when they have come; one thread at a time."""
        self.tell(lambda report: replace(report, wanted=(*report.wanted, wanted)))
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None)
            answer, self._answer = self._answer, None
        assert answer is not None
        return answer

    def take_answer(self, answer: Answer) -> None:
        """Take the driver's answer to what was asked."""
        with self._changed:
            self._answer = answer
            self._changed.notify_all()

    def take(self, wait_s: float) -> WorkerReport:
        """The next report; within ``wait_s``, or as soon as something is urgent."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_urgent, wait_s)
            changes = self._fill()
            report = replace(self._report, changes=changes)
            self._report = replace(
                report, segments={}, drafts=(), given_back=(), ended=(), changes=(), wanted=()
            )
            self._is_urgent = bool(self._queue)
            self._changed.notify_all()
            return report

    def _fill(self) -> tuple[FileChange, ...]:
        """Changes of files for the next report, which is added to by what comes between them."""
        changes: list[FileChange] = []
        room = PIECE_BYTES
        while self._queue and room > 0:
            item = self._queue.popleft()
            if not isinstance(item, FileChange):
                self._report = item(self._report)
                continue
            room -= len(item.data)
            if changes and isinstance(item, Appended) and _go_together(changes[-1], item):
                item = Appended(item.path, changes.pop().data + item.data)
            changes.append(item)
        self._waiting_bytes -= PIECE_BYTES - room
        return tuple(changes)

    def _wake(self, urgent: bool) -> None:
        if urgent:
            self._is_urgent = True
            self._changed.notify_all()


def _go_together(before: FileChange, after: FileChange) -> bool:
    """Whether two changes are what the same log grows by."""
    return type(before) is type(after) and before.path == after.path
