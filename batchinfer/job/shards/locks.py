"""Locks of an output directory that shards write to.

The directory's own lock is held by a run that writes alone for as long as it does, and by a shard
for a moment: while it looks and prepares, and while it ends the job. Each shard holds a lock of its
own for as long as it lives. These are taken, and tried, under the directory's lock only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Event

from batchinfer.console.format import printable
from batchinfer.errors import LockedError
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.shards.shard import Shard, shard_of
from batchinfer.job.storage.local_lock import HeldError, Lock

PATIENCE_S = 600.0
"""How long a shard waits for others that look, prepare or end the job."""
ALONE_PATIENCE_S = 1.0
"""How long it waits for a run that writes alone: that may be about to find that it must not."""


@contextmanager
def wait_for(lock: Lock, *, for_anyone: bool = False, stop: Event | None = None) -> Iterator[bool]:
    """Hold the directory's lock as soon as the shards that hold it for a moment let go.

    Args:
        for_anyone: wait for whoever holds it, as long as it takes: it will not be held for long.
        stop: when set, it is not waited for any longer.

    Yields:
        Whether it is held: False where that was asked to stop before.

    Raises:
        LockedError: a run that writes alone holds it, or nobody lets go of it.
    """
    began, pause, stop = time.monotonic(), 0.02, stop or Event()
    with ExitStack() as stack:
        is_held = False
        while not is_held:
            try:
                stack.enter_context(lock.held())
                is_held = True
            except HeldError as error:
                waited = time.monotonic() - began
                if not for_anyone and waited > _patience(error):
                    raise
                if stop.wait(pause):
                    break
                pause = min(2 * pause, 1.0)
        yield is_held


def _patience(error: HeldError) -> float:
    return ALONE_PATIENCE_S if error.is_alone else PATIENCE_S


def own_lock(out: OutputDir, shard: Shard) -> OutputDir:
    """``out`` as a shard writes to it, while it holds the lock of that."""
    name = f"{out.locks.name}/{shard.writer}"
    return out.under_lock(name, f"shard {shard}").for_writer(shard.writer)


def lives(out: OutputDir, shard: Shard) -> bool:
    """Whether a shard runs; one that was not heard of for long is kept from going on."""
    try:
        own_lock(out, shard).lock.make_free()
    except LockedError:
        return True
    return False


def refuse_shards(out: OutputDir, but_of: int | None = None) -> None:
    """Check that no shard runs; call it under the directory's lock.

    Args:
        but_of: shards of so many may.

    Raises:
        LockedError: one does.
    """
    for shard in shards_seen(out):
        if shard.count != but_of and lives(out, shard):
            raise LockedError(
                f"shard {shard} is writing to {printable(str(out.root))}",
                hint=f"wait until the shards of {shard.count} have ended, which others then go on "
                "from, or use --output for another directory",
            )


def shards_seen(out: OutputDir) -> list[Shard]:
    """The shards that have ever written here, whatever their number was."""
    names = sorted({path.name.partition(".")[0] for path in out.files.entries(out.locks)})
    return [shard for name in names if (shard := shard_of(name)) is not None]
