"""A worker's reports to its driver, collected until the driver asks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import Condition

from batchinfer.job.fleet.messages import WorkerReport

Tell = Callable[[WorkerReport], WorkerReport]


class Outbox:
    """The next report of a worker; several threads add to it."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._report = WorkerReport()
        self._is_urgent = False

    def tell(self, change: Tell, *, urgent: bool = True) -> None:
        """Add to the next report; with ``urgent``, let the driver have it at once."""
        with self._changed:
            self._report = change(self._report)
            if urgent:
                self._is_urgent = True
                self._changed.notify_all()

    def take(self, wait_s: float) -> WorkerReport:
        """Return the next report after ``wait_s`` seconds, or as soon as something is urgent."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_urgent, wait_s)
            report = self._report
            self._report = replace(report, segments={}, drafts=(), given_back=(), ended=())
            self._is_urgent = False
            return report
