"""Prompts made in child processes: rows out, prompts back, and an error for a row that kills.

Rows go out in lots, two to a child, so that it need not wait for this process between them. A lot
whose child dies, or takes long, is done again row by row; the row that a child then dies at is to
blame if nothing else can be: if it took too much processor time, or if the child had done nothing
before. All others get what they get anywhere.
"""

from __future__ import annotations

import os
import pickle
import selectors
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from batchinfer.cpus import available_cpus
from batchinfer.errors import DataError, DeviceError, JobError, ModelError, UsageError
from batchinfer.text.children import messages
from batchinfer.text.children.child import Recipe
from batchinfer.text.children.deaths import Death
from batchinfer.text.children.limits import Limits
from batchinfer.text.children.lots import Lot, lots_of
from batchinfer.text.children.messages import Result
from batchinfer.text.children.processes import (
    ChildProcess,
    ForkRefusedError,
    Spawner,
    not_started,
)
from batchinfer.text.tokenizer import Tokenizer

MAX_CHILDREN = 16
"""More than one process can feed."""
_LOTS_PER_CHILD = 4  # of a call: then the last to finish does not keep the others waiting for long
_MAX_DUE = 2  # lots that a child has been given
_MAX_KILLED = 4
_KILLED = (
    f"something else has killed it {_MAX_KILLED} times (SIGKILL), as the system does when it is "
    "out of memory"
)
_LOOK_S = 0.1
_LIMITS = Limits()
_REFUSALS = {kind.__name__: kind for kind in (UsageError, DataError, ModelError)}


class StoppedError(Exception):
    """Raised to whoever waits for prompts after ``TextProcesses.stop``."""


@dataclass(eq=False, slots=True)
class _Call:
    """Rows that are made into prompts; or, with one lot of no rows, a builder's columns."""

    recipe: bytes
    results: list[Result | None]
    lots: Iterator[Lot]
    again: deque[Lot] = field(default_factory=deque)
    """Those to be handed out before further ones of ``lots``."""
    num_out: int = 0
    """Lots that children have."""
    has_more: bool = True
    """Whether there may be lots that none has."""
    columns: tuple[str, ...] = ()
    error: JobError | RuntimeError | None = None
    arrived: list[tuple[Sequence[int], list[tuple[Any, ...]], bytes]] = field(default_factory=list)
    """Results that are still packed, and which rows' they are."""

    @property
    def is_over(self) -> bool:
        return self.error is not None or not (self.has_more or self.num_out)

    def next_lot(self) -> Lot | None:
        lot = self.again.popleft() if self.again else next(self.lots, None)
        self.has_more = lot is not None
        return lot

    def put_back(self, lot: Lot) -> None:
        self.again.appendleft(lot)
        self.has_more = True

    def all_results(self) -> list[Result]:
        """Those of a call that is over."""
        results = [result for result in self.results if result is not None]
        if len(results) < len(self.results):
            raise RuntimeError("a row was never handed to a child process, or its result is lost")
        return results

    def unpack(self) -> None:
        """Unpack what has arrived."""
        for at, entries, ids in self.arrived:
            for index, result in zip(at, messages.unpacked(entries, ids), strict=True):
                self.results[index] = result
        self.arrived.clear()


class TextProcesses:
    """Child processes that make prompts with one tokenizer. Thread-safe.

    The spawner starts at once, children when there is work for them. After an interrupt, and in a
    process forked off this one, a new spawner starts when there is work: what the old one was asked
    and has not answered is unknown, or another process's. Calls under way then fail.

    Args:
        most: children at a time; default the cores that this process may use.
        limits: of each.
    """

    def __init__(self, most: int | None = None, limits: Limits = _LIMITS) -> None:
        self._most = most or min(available_cpus(), MAX_CHILDREN)
        self._limits = limits
        self._tokenizer: Tokenizer | None = None
        self._calls: list[_Call] = []
        """Those under way, in the order they came."""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._start_spawner()
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
        call = _Call(pickled, [], iter([Lot([0], (), alone=True)]))
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
        call = _Call(recipe, results, lots_of(rows, results, _LOTS_PER_CHILD * self._most))
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

    def _start_spawner(self) -> None:
        self._children: dict[ChildProcess, deque[tuple[_Call, Lot]]] = {}
        """With what each is at, and what it does then."""
        self._spawner = Spawner(self._limits)
        self._selector = selectors.DefaultSelector()
        self._release = weakref.finalize(
            self, _release, self._spawner, self._children, self._selector
        )
        if self._tokenizer is not None:
            self._spawner.load(self._tokenizer)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the lock, with a spawner that answers what it is asked."""
        with self._lock:
            try:
                if not (self._release.alive or self._stopped.is_set()):
                    self._start_spawner()
                yield
            except (DeviceError, StoppedError):
                raise
            except BaseException:
                self._fail_calls("it was interrupted")
                self._release()
                raise

    def _leave_to_parent(self) -> None:
        """Have nothing to do with the processes of the process that this one was forked off."""
        self._lock = threading.Lock()  # one of its threads may have held it
        self._release.detach()
        self._spawner.leave()
        with suppress(OSError):
            self._selector.close()
        for child in self._children:
            child.close()
        self._fail_calls("this process was forked off the one that began to use it")

    def _fail_calls(self, reason: str) -> None:
        for call in self._calls:
            call.error = not_started(reason)
        self._calls.clear()

    def _begin(self, call: _Call) -> None:
        with self._held():
            self._calls.append(call)
            try:
                self._hand_out()
            except DeviceError:
                self._calls.remove(call)
                raise

    def _finish(self, call: _Call) -> list[Result]:
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

    def _wait_for(self, call: _Call) -> None:
        while not call.is_over:
            if self._stopped.is_set():
                raise StoppedError
            for key, events in self._selector.select(_LOOK_S):
                self._serve(key.data, events)
            self._hand_out()
            call.unpack()  # while children work

    def _hand_out(self) -> None:
        """Give lots to children that have none, or only one."""
        for call in self._calls:
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
                child.ask(call.recipe, lot.rows, lot.alone)
                self._watch(child)

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
        return len(self._children) >= self._most

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
            due = self._children[child]
            self._after(self._end(child), due)

    def _take(self, child: ChildProcess, answer: tuple[Any, ...]) -> None:
        call, lot = self._children[child][0]
        if answer[0] == "rendered":
            lot.is_rendered = True
            return
        if answer[0] == "results":
            _, entries, ids = answer
            call.arrived.append((lot.done(len(entries)), entries, ids))
        elif answer[0] == "columns":
            call.columns = tuple(answer[1])
            lot.done(1)
        else:
            _, name, text = answer
            call.error = _REFUSALS[name](text)
            lot.done(len(lot.at))
        if lot.is_done:
            call.num_out -= 1
            self._children[child].popleft()

    def _end(self, child: ChildProcess) -> Death:
        self._selector.unregister(child)
        del self._children[child]
        return self._spawner.end(child)

    def _after(self, death: Death, due: deque[tuple[_Call, Lot]]) -> None:
        """See to what a child was given that is dead: the first it died of."""
        for at, (call, lot) in enumerate(due):
            call.num_out -= 1
            if at:
                call.put_back(lot)
                continue
            if death.is_bug:
                call.error = RuntimeError(f"in a child process: {death.what}")
                continue
            if death.is_from_outside:
                rest = lot.after_kill()
                if rest.num_killed < _MAX_KILLED:
                    call.put_back(rest)
                else:
                    call.error = not_started(_KILLED)
                continue
            error = lot.verdict(death)
            if error is not None and not lot.rows:
                call.error = ModelError(f"the model's chat template cannot be compiled: {error}")
                continue
            if error is not None:
                call.results[lot.at[lot.num_done]] = error
            rest = lot.rest(skipped=0 if error is None else 1)
            if rest.at:
                call.put_back(rest)


def _release(
    spawner: Spawner, children: dict[ChildProcess, Any], selector: selectors.BaseSelector
) -> None:
    spawner.close()
    selector.close()
    for child in children:
        child.close()
    children.clear()


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
