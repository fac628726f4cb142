"""Hands lots of rows to children, takes their answers, and replaces those that die."""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from batchinfer.text.children.calls import Call
from batchinfer.text.children.child_process import ChildProcess
from batchinfer.text.children.deaths import Death, death
from batchinfer.text.children.limits import Limits
from batchinfer.text.children.lots import Lot
from batchinfer.text.children.processes import ForkRefusedError, Spawner, not_started

_MAX_DUE = 2  # lots that a child has been given


class Dispatcher:
    """The children of one spawner, with what each is at, and what it does then.

    Args:
        most: children at a time; fewer after one was killed, or kept from computing, by the system:
            that has too little memory, or too many processes, for so many.
    """

    def __init__(self, spawner: Spawner, limits: Limits, most: int) -> None:
        self.most = most
        self._spawner = spawner
        self._limits = limits
        self._selector = selectors.DefaultSelector()
        self._children: dict[ChildProcess, deque[tuple[Call, Lot]]] = {}

    def hand_out(self, calls: Iterable[Call]) -> None:
        """Give lots to children that have none, or only one; those of the first calls first.

        Raises:
            DeviceError: no child can be had.
        """
        for call in calls:
            while call.has_more and (lot := call.next_lot()) is not None:
                try:
                    child = self._child_for(lot)
                except BaseException:
                    call.put_back(lot)
                    raise
                if child is None:
                    call.put_back(lot)
                    return
                call.num_out += 1
                self._children[child].append((call, lot))
                child.ask(call.recipe, lot.rows, lot.alone, self._seconds(lot))
                self._watch(child)

    def take_answers(self, seconds: float) -> None:
        """Take the answers that are there, or wait for one.

        Raises:
            DeviceError: no child can be had any more.
        """
        for key, events in self._selector.select(seconds):
            if key.data in self._children:  # not ended for another's sake just now
                self._serve(key.data, events)

    def close(self) -> None:
        """End all."""
        self._spawner.close()
        self._drop_children()

    def leave(self) -> None:
        """In a process forked off this one: let go of all, and leave it running."""
        self._spawner.leave()
        self._drop_children()

    def _drop_children(self) -> None:
        with suppress(OSError):
            self._selector.close()
        for child in self._children:
            child.close()
        self._children.clear()

    def _seconds(self, lot: Lot) -> float:
        seconds = self._limits.seconds
        return max(seconds, self._limits.patient_seconds) if lot.is_patient else seconds

    def _child_for(self, lot: Lot) -> ChildProcess | None:
        """The child with the least to do; None where all have enough."""
        child = min(self._children, key=lambda one: len(self._children[one]), default=None)
        due = 0 if child is None else len(self._children[child])
        if child is not None and not lot.fresh and (due == 0 or self._is_full):
            return child if due < _MAX_DUE else None
        if child is not None and self._is_full:
            if due:
                return None
            self._end(child)
        return self._fork() or (None if lot.fresh or due >= _MAX_DUE else child)

    @property
    def _is_full(self) -> bool:
        return len(self._children) >= self.most

    def _fork(self) -> ChildProcess | None:
        try:
            child = self._spawner.fork()
        except ForkRefusedError as error:
            if any(self._children.values()):
                return None
            raise not_started(str(error)) from error
        self._children[child] = deque()
        self._selector.register(child, selectors.EVENT_READ, child)
        return child

    def _watch(self, child: ChildProcess) -> None:
        writes = selectors.EVENT_WRITE if child.has_more_to_send else 0
        self._selector.modify(child, selectors.EVENT_READ | writes, child)

    def _serve(self, child: ChildProcess, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            child.send_more()
            self._watch(child)
        if not events & selectors.EVENT_READ:
            return
        answers = child.answers()
        for answer in answers or ():
            self._take(child, answer)
        if answers is None or child.said is not None:
            self._bury(child)

    def _take(self, child: ChildProcess, answer: tuple[Any, ...]) -> None:
        call, lot = self._children[child][0]
        call.take(lot, answer)
        if lot.is_done:
            call.num_out -= 1
            self._children[child].popleft()

    def _bury(self, child: ChildProcess) -> None:
        """See to what a child was given that is dead: the first it died of."""
        due = self._children[child]
        seconds = self._seconds(due[0][1]) if due else 0.0
        died_of = self._end(child, seconds)
        if due:
            call, lot = due.popleft()
            call.num_out -= 1
            call.take_death(lot, died_of)
        _give_back(due)
        if died_of.outside is not None:
            self._shrink()

    def _shrink(self) -> None:
        """Go on with half as many children, from now on: they are too many for the system."""
        self.most = max(1, (len(self._children) + 1) // 2)
        by_due = sorted(self._children, key=lambda one: len(self._children[one]))
        for child in by_due[: len(self._children) - self.most]:
            due = self._children[child]
            self._end(child)
            _give_back(due)

    def _end(self, child: ChildProcess, seconds: float = 0.0) -> Death:
        self._selector.unregister(child)
        del self._children[child]
        return death(self._limits, seconds, self._spawner.end(child), child.said)


def _give_back(due: Iterable[tuple[Call, Lot]]) -> None:
    for call, lot in due:
        call.num_out -= 1
        call.put_back(lot.unfinished())
