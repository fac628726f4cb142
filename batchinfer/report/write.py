"""Writes a job's report, for ``batchinfer report`` and at the end of a run."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path, PurePath

import psutil

from batchinfer.console.format import first_line, size
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.records.file_record import sealed
from batchinfer.job.storage.filesystem import storage_errors
from batchinfer.report.from_output import from_output
from batchinfer.report.page import page
from batchinfer.report.report_data import Price

_SCARCE_BYTES = 2**28
"""Bytes of free address space below which an error may come from a failed allocation."""


def write_report(
    out: OutputDir, now: float, *, price: Price | None = None, to: Path | None = None
) -> PurePath:
    """Write the report on the job in ``out``, which may be running, and return its path.

    Args:
        now: seconds since 1970.
        price: the machine's price; None to show no cost.
        to: the file to write; None for ``report.html`` in ``out``.

    Raises:
        DataError: ``out`` holds no job's output, or its plan is damaged.
        StorageError: the report cannot be written.
    """
    html = sealed(page(from_output(out, now), price).encode())
    if to is not None:
        with storage_errors(to):
            to.write_bytes(html)
        return to
    with storage_errors(out.report):
        out.files.make_directory(out.staging)
    out.write(out.report, html)
    return out.report


def report_at_end(out: OutputDir, log: Callable[[str], None]) -> bool:
    """Write the report on a job that has just ended; return False if this fails, and log why."""
    try:
        write_report(out, time.time())
    except Exception as error:  # the job has all its answers and must not fail now
        log(f"no report: {_reason(error)}")
        return False
    return True


def _reason(error: Exception) -> str:
    reason = "it ran out of memory" if isinstance(error, MemoryError) else first_line(error)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    left = limit - psutil.Process().memory_info().vms
    if limit == resource.RLIM_INFINITY or left > _SCARCE_BYTES:
        return reason
    # Libraries word the errors of failed allocations in many ways, or not at all.
    return (
        f"{reason} (`ulimit -v` allows {size(limit)} of address space, of which {size(left)} are "
        "left)"
    )
