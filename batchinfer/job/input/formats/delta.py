"""Lists the files of a Delta Lake table at one version. Needs ``deltalake``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from batchinfer.errors import DataError
from batchinfer.job.input.formats.snapshot import Snapshot, refuse, refuse_deleted_rows

_PURGE = "rewrite the files with REORG TABLE ... APPLY (PURGE) or DeltaTable.optimize"
_ERRORS = (DeltaError, OSError, ValueError, pa.ArrowException)


def read_delta(path: str, version: int | None) -> Snapshot:
    """List the files of a Delta table, oldest first. Raise DataError if the table cannot be read,
    or has deletion vectors or column mapping."""
    try:
        table = DeltaTable(path, version=version)
        schema = pa.schema(table.schema().to_arrow())
        actions = pa.table(table.get_add_actions()).to_pylist()
        uris = table.file_uris()
        columns = list(table.metadata().partition_columns)
        features = table.protocol().reader_features or ()
        mapping = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    except _ERRORS as error:
        refuse(path, "delta", error)
    if mapping != "none":
        raise DataError(
            f"{path} uses column mapping (delta.columnMapping.mode): columns have "
            "different names in its files and in the table",
            hint="write a copy of the table without column mapping, and use the copy",
        )
    if "deletionVectors" in features and _has_deletion_vectors(table):
        refuse_deleted_rows(path, _PURGE)
    entries = sorted(zip(uris, actions, strict=True), key=_age)
    assert all(uri.endswith(unquote(action["path"])) for uri, action in entries), "same order"
    files = {
        uri: {column: _text(action["partition"][column]) for column in columns}
        for uri, action in entries
    }
    stored = [field for field in schema if field.name not in columns]
    whole = pa.schema([*stored, *map(schema.field, columns)])
    return Snapshot(table.version(), whole, files)


def _age(file: tuple[str, Mapping[str, Any]]) -> tuple[int, str]:
    uri, action = file
    return action["modification_time"], uri


def _has_deletion_vectors(table: DeltaTable) -> bool:
    try:
        return bool(pa.table(table.deletion_vectors()).num_rows)
    except _ERRORS:  # a file has a deletion vector that cannot be read
        return True


def _text(value: object) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    return None if value is None else str(value)
