"""Stores a job's choice of kernels, so that all of its processes use the same kernels.

Kernels sum in different orders, so the last bits of their results differ. The first process that
loads the model writes its choice to the note ``_batchinfer/kernels.json``. Each process reads the
note before it loads its model, and again afterwards, because another process may have written the
note in the meantime.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import TypeAdapter

from batchinfer.job.output.directory import OutputDir
from batchinfer.job.storage.filesystem import read_file, storage_errors

_NOTE = TypeAdapter(dict[str, str])


def noted_kernels(out: OutputDir) -> dict[str, str]:
    """Return the noted kernels, keyed by the weights' dtype; {} if there is no intact note."""
    try:
        return _NOTE.validate_json(read_file(out.files, out.kernels))
    except (OSError, ValueError):
        return {}


def note_kernels(out: OutputDir, kernels: Mapping[str, str]) -> dict[str, str]:
    """Return the noted kernels. Note ``kernels`` if there is no note. The caller holds the
    directory's lock."""
    noted = noted_kernels(out) or dict(kernels)
    if noted == kernels and kernels:
        out.write_json(out.kernels, noted)
    return noted


def forget_kernels(out: OutputDir) -> None:
    """Delete the note of an output without finished rows. The caller holds the directory's lock."""
    if out.files.stat(out.kernels) is not None:
        with storage_errors(out.kernels, "delete"):
            out.files.delete(out.kernels)
