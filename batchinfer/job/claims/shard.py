"""Shards of a job: each shard writes a range of consecutive parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from batchinfer.console.format import format_value
from batchinfer.errors import UsageError

_SHARD = re.compile(r"([0-9]+)/([0-9]+)")


@dataclass(frozen=True)
class Shard:
    """Shard ``index`` of ``count`` shards; ``index`` counts from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def writer(self) -> str:
        """Name under which the shard writes to an ``OutputDir``."""
        return f"s{self.index:04d}of{self.count}"

    def parts(self, num_parts: int) -> range:
        return range(
            num_parts * self.index // self.count, num_parts * (self.index + 1) // self.count
        )

    def maker(self, index: int, num_parts: int) -> Shard:
        """Return the shard of the job that writes the part with this index."""
        siblings = (Shard(at, self.count) for at in range(self.count))
        return next(shard for shard in siblings if index in shard.parts(num_parts))


def parse_shard(text: str, environment: Mapping[str, str]) -> Shard:
    """Return the shard that ``--shard`` names.

    Args:
        text: ``I/N``, or ``auto`` for the task of the Slurm array that this process runs in.
        environment: environment variables, such as Slurm's.

    Raises:
        UsageError: the text does not name a shard.
    """
    if text == "auto":
        return _of_array(environment)
    match = _SHARD.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--shard {format_value(text)} is neither I/N nor auto",
            hint="give the shard and the number of shards, like --shard 0/4",
        )
    index, count = int(match[1]), int(match[2])
    if index >= count:
        last = f": with N = {count}, the shards are 0/{count} to {count - 1}/{count}"
        array = f"--array=0-{max(count, 1) - 1}"
        raise UsageError(
            f"--shard {index}/{count}: I must be from 0 to N - 1{last if count else ''}",
            hint=f"in a Slurm job, start the array at 0 ({array}), or use --shard auto",
        )
    return Shard(index, count)


def _of_array(environment: Mapping[str, str]) -> Shard:
    if "SLURM_ARRAY_TASK_ID" in environment:
        return _of_slurm(environment)
    if "JOB_COMPLETION_INDEX" in environment:
        raise UsageError(
            "--shard auto: Kubernetes gives the index of this shard, but not how "
            "many shards there are",
            hint="give the index and the number of shards, like "
            '--shard "$(JOB_COMPLETION_INDEX)/8" for completions: 8',
        )
    raise UsageError(
        "--shard auto: this is not a task of a Slurm array (SLURM_ARRAY_TASK_ID is not set)",
        hint="give the shard and the number of shards, like --shard 0/4",
    )


def _of_slurm(environment: Mapping[str, str]) -> Shard:
    """Return the shard of a Slurm task; an array may start at any number and have any step."""
    names = ("TASK_ID", "TASK_MIN", "TASK_MAX", "TASK_COUNT")
    try:
        at, first, last, count = (int(environment[f"SLURM_ARRAY_{name}"]) for name in names)
    except (KeyError, ValueError):
        raise UsageError(
            "--shard auto: Slurm does not say how many tasks this array has",
            hint="give the shard and the number of shards, like --shard 0/4",
        ) from None
    step = (last - first) // (count - 1) if count > 1 else 1
    if first + step * (count - 1) != last or (at - first) % step:
        raise UsageError(
            "--shard auto: the task ids of this Slurm array are not evenly spaced, so they do not "
            "identify this shard",
            hint='give the shard and the number of shards, like --shard "$SLURM_ARRAY_TASK_ID/8"',
        )
    return Shard((at - first) // step, count)
