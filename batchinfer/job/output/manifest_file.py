"""Stores the plan of an output directory twice, so that a damaged file costs no finished work."""

from __future__ import annotations

from contextlib import suppress
from pathlib import PurePath

from batchinfer.console.format import printable
from batchinfer.errors import DataError
from batchinfer.job.manifest import Manifest, read_manifest
from batchinfer.job.output.directory import OutputDir


def is_begun(out: OutputDir) -> bool:
    """Return True if a plan was stored in ``out``, even if the plan is damaged or lost."""
    plans = any(out.files.stat(path) is not None for path in (out.manifest, out.manifest_copy))
    return plans or bool(out.files.entries(out.parts))


def store_manifest(out: OutputDir, manifest: Manifest) -> None:
    """Write the plan of a new output."""
    data = manifest.to_json()
    for path in (out.manifest_copy, out.manifest):
        out.write(path, data)


def stored_manifest(out: OutputDir) -> Manifest:
    """Return the stored plan, or its copy if the plan is damaged or missing. Raise DataError if the
    copy is damaged or missing too."""
    for path in (out.manifest, out.manifest_copy):
        with suppress(DataError):
            return read_manifest(path, out.files)
    root, manifest = printable(str(out.root)), printable(str(out.manifest))
    missing = out.files.stat(out.manifest) is None
    raise DataError(
        f"{manifest} is {('missing' if missing else 'damaged')}, and its copy "
        "cannot be read either: the finished rows may belong to another job",
        hint=f"restore the file from a backup, or move {root} away and run again "
        "(--overwrite deletes the finished rows)",
    )


def is_stored_whole(out: OutputDir) -> bool:
    """Return True if neither the plan nor its copy is damaged or missing."""
    return not _damaged(out)


def restore_manifest(out: OutputDir, manifest: Manifest) -> None:
    """Write the plan or its copy again if it is damaged or missing."""
    for path in _damaged(out):
        out.write(path, manifest.to_json())


def _damaged(out: OutputDir) -> list[PurePath]:
    damaged = []
    for path in (out.manifest_copy, out.manifest):
        try:
            read_manifest(path, out.files)
        except DataError:
            damaged.append(path)
    return damaged
