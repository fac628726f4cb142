"""Detects Delta Lake and Apache Iceberg tables, and opens them."""

from __future__ import annotations

from collections.abc import Sequence

from batchinfer.console.format import printable
from batchinfer.errors import DataError, UsageError, install_command
from batchinfer.job.input.discover import is_named
from batchinfer.job.input.formats.snapshot import Snapshot
from batchinfer.job.storage.reader import store_of

TABLES = ("delta", "iceberg")
"""Values of ``input.format`` that name a kind of table."""


def table_format(paths: Sequence[str], format_name: str) -> str | None:
    """Return the kind of table at ``paths``, or None if ``paths`` name plain files.

    Args:
        paths: ``input.path``.
        format_name: ``input.format``. With ``auto``, the content of a folder decides.

    Raises:
        UsageError: a table is not the only path.
    """
    kinds = [_kind(path) for path in paths] if format_name == "auto" else [format_name]
    table_kind = next((kind for kind in kinds if kind in TABLES), None)
    if table_kind is not None and len(paths) > 1:
        raise UsageError(
            f"input.path: a table ({table_kind}) must be the only path",
            hint="run a separate job for each table",
        )
    return table_kind


def _kind(path: str) -> str | None:
    if path.endswith(".metadata.json"):
        return "iceberg"
    if is_named(path):
        return None
    try:
        store, folder = store_of(path), path.rstrip("/")
        if store.kind(path) != "folder":
            return None
        if store.kind(f"{folder}/_delta_log") == "folder":
            return "delta"
        is_iceberg = store.kind(f"{folder}/metadata") == "folder" and bool(
            store.files_below(f"{folder}/metadata", (".metadata.json",))
        )
        return "iceberg" if is_iceberg else None
    except OSError:
        return None  # find_files reports the error


def open_table(path: str, kind: str, version: int | None) -> Snapshot:
    """Open a table at a version; None opens the latest.

    Raises:
        DataError: the table cannot be read, is not supported, or has no rows.
        UsageError: the library that reads the table is not installed.
    """
    try:
        if kind == "delta":
            from batchinfer.job.input.formats.delta import read_delta

            snapshot = read_delta(path, version)
        else:
            from batchinfer.job.input.formats.iceberg import read_iceberg

            snapshot = read_iceberg(path, version)
    except ImportError:
        raise UsageError(
            f"input.path: {printable(path)} is a table ({kind}), but batchinfer's {kind} extra is "
            "not installed",
            hint=f"{install_command(kind)}; or set input.format: parquet to read all "
            "files in the folder, including those of other versions",
        ) from None
    if not snapshot.partitions:
        raise DataError(f"{path} has no rows at version {snapshot.version}")
    return snapshot
