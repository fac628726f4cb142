"""Prompts made in child processes: rows out, prompts back, and an error for a row that kills.

Rows go out in lots, two to a child, so that it need not wait for this process between them. A lot
whose child dies, or takes long, is done again row by row; the row that a child then dies at is to
blame if nothing else can be: if it took too much processor time, or if the child had done nothing
before. All others get what they get anywhere.
"""

from __future__ import annotations

import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from batchinfer.cpus import available_cpus
from batchinfer.errors import DeviceError
from batchinfer.text.children.calls import Call
from batchinfer.text.children.child import Recipe
from batchinfer.text.children.dispatcher import Dispatcher
from batchinfer.text.children.limits import Limits
from batchinfer.text.children.lots import Lot, lots_of
from batchinfer.text.children.messages import Result
from batchinfer.text.children.processes import LOOK_S, Spawner, StoppedError, not_started
from batchinfer.text.tokenizer import Tokenizer

MAX_CHILDREN = 16
"""More than one process can feed."""
_LOTS_PER_CHILD = 4  # of a call: then the last to finish does not keep the others waiting for long
_LIMITS = Limits()


class TextProcesses:
    """Child processes that make prompts with one tokenizer. Thread-safe.

    The spawner starts at once, children when there is work for them. After an interrupt, the
    spawner's end, and in a process forked off this one, a new spawner starts when there is work:
    what the old one was asked and has not answered is unknown, or another process's. Calls under
    way then fail.

    Args:
        most: children at a time at first; default the cores that this process may use.
        limits: of each.
    """

    def __init__(self, most: int | None = None, limits: Limits = _LIMITS) -> None:
        self._limits = limits
        self._tokenizer: Tokenizer | None = None
        self._calls: list[Call] = []
        """Those under way, in the order they came."""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._start_spawner(most or min(available_cpus(), MAX_CHILDREN))
        _all.add(self)

    def load(self, tokenizer: Tokenizer) -> None:
        """Give children their tokenizer; once, before anything else is asked of them.

        Raises:
            DeviceError: they cannot be started.
        """
        self._tokenizer = tokenizer
        self._spawner.load(tokenizer)

    def prompts(self, recipe: Recipe) -> ChildPrompts:
        """Prompts as the builder makes them that ``recipe`` makes of a tokenizer.

        Raises:
            JobError: as the recipe raises.
            ModelError: making the builder is too much for a child: its chat template is.
            DeviceError: children cannot be started.
        """
        pickled = pickle.dumps(recipe, pickle.HIGHEST_PROTOCOL)
        call = Call(pickled, [], iter([Lot([0], (), alone=True)]))
        self._begin(call)
        self._finish(call)
        return ChildPrompts(self, pickled, call.columns)

    def start(
        self, recipe: bytes, rows: Sequence[Mapping[str, object]]
    ) -> Callable[[], list[Result]]:
        """Begin to make prompts.

        Returns:
            Waits for a prompt or an error for each row, in order.

        Raises:
            DeviceError: no child can be had. What is returned may raise it too, and a
                ``StoppedError``: ``stop`` was called.
        """
        results: list[Result | None] = [None] * len(rows)
        call = Call(
            recipe, results, lots_of(rows, results, _LOTS_PER_CHILD * self._dispatcher.most)
        )
        self._begin(call)
        return partial(self._finish, call)

    def stop(self) -> None:
        """Have whoever waits for prompts, in another thread, wait no longer."""
        self._stopped.set()

    def close(self) -> None:
        """End the children, whatever they are at."""
        self.stop()
        with self._lock:
            self._release()

    def _start_spawner(self, most: int) -> None:
        self._spawner = Spawner(self._limits, self._stopped)
        self._dispatcher = Dispatcher(self._spawner, self._limits, most)
        self._release = weakref.finalize(self, self._dispatcher.close)
        if self._tokenizer is not None:
            self._spawner.load(self._tokenizer)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the lock, with a spawner that answers what it is asked."""
        with self._lock:
            try:
                if not (self._release.alive or self._stopped.is_set()):
                    self._start_spawner(self._dispatcher.most)
                yield
            except StoppedError:
                raise
            except DeviceError:
                if self._spawner.has_failed:
                    self._start_over("it was ended")
                raise
            except BaseException:
                self._start_over("it was interrupted")
                raise

    def _start_over(self, reason: str) -> None:
        """Fail the calls under way, and have a new spawner started when there is work again."""
        self._fail_calls(reason)
        self._release()

    def _leave_to_parent(self) -> None:
        """Have nothing to do with the processes of the process that this one was forked off."""
        self._lock = threading.Lock()  # one of its threads may have held it
        self._release.detach()
        self._dispatcher.leave()
        self._fail_calls("this process was forked off the one that began to use it")

    def _fail_calls(self, reason: str) -> None:
        for call in self._calls:
            call.error = not_started(reason)
        self._calls.clear()

    def _begin(self, call: Call) -> None:
        with self._held():
            self._calls.append(call)
            try:
                self._dispatcher.hand_out(self._calls)
            except DeviceError:
                self._calls.remove(call)
                raise

    def _finish(self, call: Call) -> list[Result]:
        with self._held():
            try:
                self._wait_for(call)
            finally:
                if call in self._calls:
                    self._calls.remove(call)
        call.unpack()
        if call.error is not None:
            raise call.error
        return call.all_results()

    def _wait_for(self, call: Call) -> None:
        while not call.is_over:
            if self._stopped.is_set():
                raise StoppedError
            self._dispatcher.take_answers(LOOK_S)
            self._dispatcher.hand_out(self._calls)
            call.unpack()  # while children work


_all: weakref.WeakSet[TextProcesses] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for processes in _all:
        processes._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


class ChildPrompts:
    """Makes prompts of rows in child processes (see ``batchinfer.text.prompts.PromptBuilder``)."""

    def __init__(self, processes: TextProcesses, recipe: bytes, columns: tuple[str, ...]) -> None:
        self.columns = columns
        """The input columns that ``build`` needs."""
        self._processes = processes
        self._recipe = recipe

    def build(self, rows: Sequence[Mapping[str, object]]) -> list[Result]:
        """A prompt or an error for each row, in order.

        Error codes: those of the builder; ``template_error`` or ``tokenizer_error`` for a row that
        its child died of; ``row_too_large``.

        Raises:
            StoppedError: ``TextProcesses.stop`` was called.
            DeviceError: no child can be had.
        """
        return self.start(rows)()

    def start(self, rows: Sequence[Mapping[str, object]]) -> Callable[[], list[Result]]:
        """Begin to ``build``; what is returned waits for it, and raises as it."""
        needed = [{name: row[name] for name in self.columns if name in row} for row in rows]
        return self._processes.start(self._recipe, needed)
