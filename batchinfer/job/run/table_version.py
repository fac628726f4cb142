"""Chooses the version of a table to read: the latest, or the version that the output began with."""

from __future__ import annotations

from contextlib import suppress

from batchinfer.console.format import printable
from batchinfer.console.terminal import print_line
from batchinfer.errors import JobError
from batchinfer.job.input.identity import have_common_files
from batchinfer.job.job import identified, open_input, open_job
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.manifest_file import stored_manifest
from batchinfer.job.spec.spec import JobSpec


def at_version(
    spec: JobSpec, planned: Manifest | None, out: OutputDir, *, retry_errors: bool
) -> JobSpec:
    """Return the job with the version of its table that a run without ``--update`` reads.

    If an update is unfinished, the run reads the version of the update. Otherwise it reads the
    version that the output began with, until the job has ended. With ``--retry-errors`` it keeps
    this version after the end too, unless the latest version has the same number of rows: somebody
    may have corrected failed rows.

    Args:
        planned: the plan of the output in ``out``; None if there is no plan.
        retry_errors: True if failed rows run again.

    Raises:
        JobError: the table cannot be read.
    """
    if spec.input.version is not None:
        return spec
    begun = _of_begun_update(spec, out)
    if begun is not None:
        return begun
    if planned is None or planned.table_version is None:
        return spec
    if not retry_errors and out.files.stat(out.success) is not None:
        return spec
    before = _at(spec, planned.table_version)
    if planned.input_paths != tuple(spec.input.paths) and not _finds_again(before, planned):
        return spec
    return _for_errors(spec, before, planned) if retry_errors else before


def _of_begun_update(spec: JobSpec, out: OutputDir) -> JobSpec | None:
    """Return the job at the version of its unfinished update, if there is one."""
    for path in out.files.entries(out.next):
        with suppress(JobError):
            plan = stored_manifest(out.generation(path.name))
            if plan.table_version is not None:
                candidate = _at(spec, plan.table_version)
                source = identified(open_input(candidate), plan)
                if open_job(candidate, source).manifest.name == path.name:
                    return candidate
    return None


def _for_errors(spec: JobSpec, before: JobSpec, planned: Manifest) -> JobSpec:
    latest = open_input(spec)
    if latest.num_rows == planned.num_rows:
        return spec
    print_line(
        f"{printable(', '.join(spec.input.paths))} has other rows at version {latest.version}: "
        f"errors are retried at version {planned.table_version}; --update reads the latest",
        to_stderr=True,
    )
    return before


def _at(spec: JobSpec, version: int) -> JobSpec:
    return spec.model_copy(update={"input": spec.input.model_copy(update={"version": version})})


def _finds_again(pinned: JobSpec, planned: Manifest) -> bool:
    """Return True if a table is the planned table, moved to another path."""
    with suppress(JobError):
        source = identified(open_input(pinned), planned)
        return have_common_files(planned.inputs, source.files)
    return False
