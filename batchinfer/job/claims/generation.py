"""Generations of an output: an update writes the next generation to a folder inside the output."""

from __future__ import annotations

from contextlib import suppress

from batchinfer.errors import DataError
from batchinfer.job.claims.writers import refuse_writers
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.manifest_file import is_begun, stored_manifest
from batchinfer.job.output.open import output_at
from batchinfer.job.output.resume import has_finished_rows, has_rows
from batchinfer.job.storage.filesystem import storage_errors


def next_generation(
    out: OutputDir, manifest: Manifest, *, update: bool, retry_errors: bool
) -> OutputDir | None:
    """Return the directory of the next generation; None if this run writes to ``out`` itself.

    A run writes a new generation if ``out`` holds rows of another job or input, or of image files
    that may have changed, and if one of these conditions is met as well:

    - an earlier run began the generation;
    - ``update`` is set;
    - ``retry_errors`` is set, the job or the input differs, and no row would be lost.

    Raises:
        DataError: the stored plan is damaged.
    """
    has_plan = any(out.files.stat(path) for path in (out.manifest, out.manifest_copy))
    if not has_plan or not has_finished_rows(out):
        return None
    stored, generation = stored_manifest(out), out.generation(manifest.name)
    is_same = stored.is_of_same_job(manifest)
    if is_same and stored.image_files == manifest.image_files:
        return None
    retries = retry_errors and not is_same and manifest.num_rows >= stored.num_rows
    return generation if update or retries or is_begun(generation) else None


def refuse_workers_of_updates(out: OutputDir) -> None:
    """Raise LockedError if a worker of a killed launcher still writes to a generation."""
    for path in out.files.entries(out.next):
        generation = output_at(str(path))  # the workers' locks are inside
        with generation.locked():
            refuse_writers(generation)


def drop_generations(out: OutputDir) -> None:
    """Delete unfinished generations, which are useless once an update has found nothing to do.

    Raises:
        LockedError: a worker still writes to a generation.
    """
    if out.files.entries(out.next):
        with out.locked():
            refuse_workers_of_updates(out)
            with storage_errors(out.next, "delete"):
                out.files.delete(out.next)


def other_generations(out: OutputDir, own: OutputDir) -> list[OutputDir]:
    """Return the generations other than ``own`` that have rows; delete generations without rows.

    The caller holds the lock of ``out``.
    """
    generations = []
    for path in out.files.entries(out.next):
        generation = out.generation(path.name)
        if path.name == own.root.name:
            continue
        if not has_rows(generation):
            with storage_errors(path, "delete"):
                out.files.delete(path)
            continue
        with suppress(DataError):
            # Skip a generation if its plan is damaged, because its rows are unknown.
            stored_manifest(generation)
            generations.append(generation)
    return generations
