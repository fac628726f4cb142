"""The processes that write to one output at the same time: their names, locks and claims.

A run that writes alone holds the directory's lock as long as it lives. Writers that share a
directory hold this lock only briefly: to read the state, prepare, claim, publish or end the job. A
writer that shares a directory also holds its own lock, ``locks/NAME``, as long as it lives. Writers
take and test these locks only under the directory's lock.

``claims/NAME.json`` lists the parts that a writer works on. Another process deletes a writer's
claims file if the writer's lock is free, or was not refreshed for a long time. A writer without a
claims file cannot publish, and its unfinished parts are free.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from secrets import token_hex
from typing import ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, TypeAdapter

from batchinfer.console.format import printable
from batchinfer.errors import LockedError
from batchinfer.job.claims.shard import Shard
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.run_ids import run_number, writer_of
from batchinfer.job.storage.filesystem import STRICT, read_file, storage_errors
from batchinfer.job.storage.local_lock import HeldError, Lock

PATIENCE_S = 600.0
"""Maximum seconds that a writer waits for the directory's lock while other writers hold it."""
ALONE_PATIENCE_S = 1.0
"""Maximum seconds that a writer waits for a run that writes alone, which may be about to end."""
LAUNCHER = "workers"
"""Name of the writer that starts workers and does not work on parts itself."""
_WRITER = re.compile(r"(?:s(?P<index>[0-9]+)of(?P<count>[0-9]+))?(?:w(?P<number>[0-9]+))?")


@dataclass(frozen=True)
class Writer:
    shard: Shard | None = None
    """The shard whose parts the writer works on; None for parts of the whole job."""
    number: int | None = None
    """Number of the worker, from 1; None if the writer is not a worker."""

    @property
    def name(self) -> str:
        shard = "" if self.shard is None else self.shard.writer
        worker = "" if self.number is None else f"w{self.number:02d}"
        return f"{shard}{worker}" or LAUNCHER

    @property
    def team(self) -> str:
        """Name of the writer's team. Only writers of one team may write at the same time."""
        return "workers" if self.shard is None else f"{self.shard.count} shards"

    def __str__(self) -> str:
        if self.number is None:
            return "the run that starts workers" if self.shard is None else f"shard {self.shard}"
        of = "" if self.shard is None else f" of shard {self.shard}"
        return f"worker {self.number}{of}"


def writer_named(name: str) -> Writer | None:
    """Return the writer with this name; None if no writer can have the name."""
    if name == LAUNCHER:
        return Writer()
    match = _WRITER.fullmatch(name)
    if not name or match is None:
        return None
    shard = None if match["index"] is None else Shard(int(match["index"]), int(match["count"]))
    return Writer(shard, None if match["number"] is None else int(match["number"]))


@contextmanager
def wait_for(
    lock: Lock, *, for_anyone: bool = False, is_over: Callable[[], bool] = lambda: False
) -> Iterator[bool]:
    """Hold the directory's lock as soon as other writers release it.

    Args:
        for_anyone: True to wait without a time limit, even for a run that writes alone. Set it only
            if every holder will soon release the lock.
        is_over: returns True to stop waiting.

    Yields:
        True if the lock is held, False if ``is_over`` ended the wait.

    Raises:
        LockedError: a run that writes alone holds the lock, or the lock is not released in time.
    """
    began, pause = time.monotonic(), 0.01
    with ExitStack() as stack:
        is_held = False
        while not is_held:
            try:
                stack.enter_context(lock.held())
                is_held = True
            except HeldError as error:
                patience = ALONE_PATIENCE_S if error.is_alone else PATIENCE_S
                if not for_anyone and time.monotonic() - began > patience:
                    raise
                if is_over():
                    break
                time.sleep(pause)
                pause = min(2 * pause, 0.3)
        yield is_held


def own_lock(out: OutputDir, writer: Writer) -> OutputDir:
    """Return ``out`` with the writer's lock and staging folder."""
    name = f"{out.locks.name}/{writer.name}"
    return out.under_lock(name, str(writer)).for_writer(writer.name)


def lives(out: OutputDir, writer: Writer) -> bool:
    """Return True if a writer is running; drop its claims if it died or was silent for too long."""
    if not own_lock(out, writer).lock.is_free():
        return True
    Claims(out, writer).drop()
    return False


def writers_seen(out: OutputDir) -> list[Writer]:
    """Return all writers that ever had a lock in the directory."""
    names = sorted({path.name.partition(".")[0] for path in out.files.entries(out.locks)})
    return [writer for name in names if (writer := writer_named(name)) is not None]


def living_writers(out: OutputDir, own: Writer) -> list[Writer]:
    """Return the writers that are running, including this process's writer ``own``."""
    other_writers = [writer for writer in writers_seen(out) if writer != own]
    return [own, *(writer for writer in other_writers if lives(out, writer))]


def refuse_writers(out: OutputDir, but_of: str = "") -> None:
    """Check that no other writer runs. The caller holds the directory's lock.

    Args:
        but_of: name of a team whose writers may run.

    Raises:
        LockedError: a writer runs.
    """
    for writer in writers_seen(out):
        if writer.team != but_of and lives(out, writer):
            raise LockedError(
                f"{writer} is writing to {printable(str(out.root))}",
                hint="wait until it has finished, or use --output for another directory",
            )


@dataclass(frozen=True)
class _Stored:
    """The content of ``claims/NAME.json``."""

    __pydantic_config__: ClassVar = STRICT

    token: str
    """Random text that identifies the process; a later process may have the same name."""
    first_run: NonNegativeInt
    """Number of this process's first run; runs with its name and lower numbers have died."""
    parts: list[tuple[NonNegativeInt, NonNegativeInt]]
    rows_per_s: NonNegativeFloat = 0.0
    """Speed of a worker; 0 if it is not known yet."""


_STORED = TypeAdapter(_Stored)


class Claims:
    """The parts that one writer has claimed; they change only under the directory's lock."""

    def __init__(self, out: OutputDir, writer: Writer) -> None:
        self.writer = writer
        self._out = out
        self._path = out.claims / f"{writer.name}.json"
        self._mine = _Stored(token_hex(8), 0, [])

    def begin(self, first_run: int, parts: Sequence[range] = ()) -> None:
        """Claim ``parts`` instead of earlier claims; ``first_run`` numbers this process's first
        run."""
        with storage_errors(self._out.claims):
            self._out.files.make_directory(self._out.claims)
        ranges = [(rows.start, rows.stop) for rows in parts]
        self._mine = _Stored(self._mine.token, first_run, ranges)
        self._store()

    def add(self, parts: Sequence[range], rows_per_s: float = 0.0) -> None:
        """Claim more parts, and note this worker's speed. Raise LockedError if the claims were
        lost."""
        self.check()
        parts_claimed = [*self._mine.parts, *((rows.start, rows.stop) for rows in parts)]
        self._mine = replace(self._mine, parts=parts_claimed, rows_per_s=rows_per_s)
        self._store()

    def check(self) -> None:
        """Check that this process has not lost its claims.

        Raises:
            LockedError: other processes took over its parts, because this process was silent for
                too long.
        """
        stored = self.stored()
        if stored is None or stored.token != self._mine.token:
            raise LockedError(
                "other processes have taken over this process's parts of "
                f"{printable(str(self._out.root))}, because this process gave "
                "no sign of life for too long",
                hint="let them finish, or run this command again",
            )

    def stored(self) -> _Stored | None:
        """Return the stored claims of the writer; None if it never had claims or has lost them."""
        try:
            return _STORED.validate_json(read_file(self._out.files, self._path))
        except (OSError, ValueError):
            return None

    @property
    def rows_per_s(self) -> float:
        stored = self.stored()
        return 0.0 if stored is None else stored.rows_per_s

    @property
    def claimed(self) -> set[int]:
        """Indices of the claimed parts, including parts that are finished."""
        stored = self.stored()
        ranges = stored.parts if stored else []
        return {index for first, stop in ranges for index in range(first, stop)}

    def drop(self) -> None:
        if self._out.files.stat(self._path) is not None:
            with storage_errors(self._path, "delete"):
                self._out.files.delete(self._path)

    def _store(self) -> None:
        self._out.write(self._path, json.dumps(asdict(self._mine)).encode())


def dead_logs(out: OutputDir, living: Sequence[Writer]) -> list[PurePath]:
    """Return the logs of rows in flight that dead runs left, under the directory's lock."""
    first_run = {}
    for writer in living:
        stored = Claims(out, writer).stored()
        first_run[writer.name] = 0 if stored is None else stored.first_run
    return [
        log
        for log in out.files.entries(out.in_flight)
        if run_number(log.name) < first_run.get(writer_of(log.name), run_number(log.name) + 1)
    ]
