"""What a fleet's driver and its workers tell each other: plain values, fit to be sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from batchinfer import errors
from batchinfer.console.meter import Counts
from batchinfer.errors import JobError
from batchinfer.job.fleet.lease import Lease
from batchinfer.job.output.commit import Draft
from batchinfer.job.row_ids import RowIds

Access = Literal["disk", "store"]
"""Where a worker writes its files: to a disk that it shares with the driver, or to the store."""


@dataclass(frozen=True)
class Assignment:
    """A lease on its way to its worker."""

    lease: Lease
    segments: tuple[str, ...]
    """Names of the segments that hold rows of its parts."""
    given_up: RowIds
    """Rows of it that are not to run: they have killed workers."""
    tokens: tuple[str, ...] = ()
    """Names of files with tokens of rows that ran before, perhaps of its own."""


@dataclass(frozen=True)
class Ready:
    """A worker has loaded its model."""

    host: str
    device: str
    kernels: Mapping[str, str]
    """``EngineContext.kernels``."""
    access: Access = "disk"


@dataclass(frozen=True)
class Failure:
    """What ends a worker in order: an error that its driver raises, or a bug."""

    kind: str
    """Class in ``batchinfer.errors``; "" for a bug."""
    text: str

    def error(self) -> JobError:
        """The error, to be raised again."""
        raised: JobError = getattr(errors, self.kind, JobError)(self.text)
        return raised


@dataclass(frozen=True)
class WorkerReport:
    """What a worker has done since its last report, and where it is."""

    counts: Counts = field(default_factory=Counts)
    """What it has done since it was ready."""
    num_unadmitted: int = 0
    """Rows of its leases that its engine has not got yet."""
    latest_fence: int = 0
    """The last lease that it knew of."""
    pool_use: float | None = None
    """Used share of the KV blocks in the latest step; None: there is no pool, or was no step."""
    segments: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Segments it has written, by name: index of a part, and the row group of its rows."""
    drafts: tuple[Draft, ...] = ()
    """Parts it has made and staged."""
    given_back: tuple[tuple[tuple[int, RowIds], ...], ...] = ()
    """Answers to requests for rows, each: rows by fence, perhaps none."""
    ended: tuple[int, ...] = ()
    """Fences of leases whose rows are on disk."""
    failure: Failure | None = None
    is_over: bool = False
    """Whether it has stopped and put everything on disk."""
