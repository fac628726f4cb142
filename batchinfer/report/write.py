"""``batchinfer report``: a job's page, written beside its output."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path, PurePath

from batchinfer.errors import UsageError
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.storage.filesystem import storage_errors
from batchinfer.report.from_output import from_output

_NEEDS = "report.html needs the packages altair and vl-convert-python"
_INSTALL = "pip install 'batchinfer[report]'"


def check_installed() -> None:
    """Check that the packages that draw are there.

    Raises:
        UsageError: they are not; says how to install them.
    """
    if any(find_spec(name) is None for name in ("altair", "vl_convert")):
        raise UsageError(_NEEDS, hint=_INSTALL)


def write_report(
    out: OutputDir, now: float, *, price_per_hour: float | None = None, to: Path | None = None
) -> PurePath:
    """Write the report on the job in ``out``; it may be running.

    Args:
        out: the output directory.
        now: seconds since 1970.
        price_per_hour: of the machine.
        to: where to write it; None: ``report.html`` in ``out``.

    Returns:
        Where it is.

    Raises:
        UsageError: the packages that draw are not installed.
        DataError: there is no job's output, or its plan is damaged.
        StorageError: it cannot be written.
    """
    check_installed()
    from batchinfer.report.page import page

    html = page(from_output(out, now), price_per_hour).encode()
    if to is not None:
        with storage_errors(to):
            to.write_bytes(html)
        return to
    with storage_errors(out.report):
        out.files.make_directory(out.staging)
    out.write(out.report, html)
    return out.report
