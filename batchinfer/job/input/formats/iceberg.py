"""Lists the files of an Apache Iceberg table at one snapshot. Needs ``pyiceberg``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.exceptions import NoSuchTableError, ValidationError
from pyiceberg.schema import Schema, index_by_id
from pyiceberg.table import FileScanTask, StaticTable

from batchinfer.console.format import format_value
from batchinfer.errors import DataError
from batchinfer.job.input.formats.snapshot import Snapshot, refuse, refuse_deleted_rows
from batchinfer.job.storage.reader import store_of

_NUMBER = re.compile(r"^v?(\d+)[.-]")
_ID = b"PARQUET:field_id"
_ERRORS = (OSError, ValueError, KeyError, NoSuchTableError, ValidationError, pa.ArrowException)


def read_iceberg(path: str, version: int | None) -> Snapshot:
    """List the files of an Iceberg table, oldest first.

    Args:
        path: a metadata file, or the table's folder, whose latest metadata file is then used.
        version: id of a snapshot; None for the current snapshot.

    Raises:
        DataError: the table cannot be read, or has delete files, files that are not Parquet, or
            columns that were renamed or moved to partitions.
    """
    try:
        table = StaticTable.from_metadata(_metadata_file(path))
        snapshot = table.snapshot_by_id(version) if version else table.current_snapshot()
        if snapshot is None:
            raise ValueError("it has no such snapshot" if version else "it has no snapshot")
        scan = table.scan(snapshot_id=version)
        schema, tasks = scan.projection(), list(scan.plan_files())
        entries = [
            entry
            for manifest in snapshot.manifests(table.io)
            for entry in manifest.fetch_manifest_entry(table.io)
        ]
    except _ERRORS as error:
        refuse(path, "iceberg", error)
    for task in tasks:
        _check_task(path, task)
    age = {entry.data_file.file_path: entry.sequence_number or 0 for entry in entries}
    uris = sorted((task.file.file_path for task in tasks), key=lambda uri: (age[uri], uri))
    files = [_path(uri) for uri in uris]
    for file in files:
        _check_names(file, schema)
    return Snapshot(snapshot.snapshot_id, schema.as_arrow(), {file: {} for file in files})


def _metadata_file(path: str) -> str:
    if path.endswith(".json"):
        return path
    files = store_of(path).files_below(f"{path.rstrip('/')}/metadata", (".metadata.json",))
    if not files:
        raise ValueError("its folder has no metadata/*.metadata.json")
    return max(files, key=_number)


def _number(file: str) -> tuple[int, str]:
    match = _NUMBER.match(file.rpartition("/")[2])
    return (int(match[1]) if match else -1), file


def _path(uri: str) -> str:
    """Convert a ``file:`` URL to a path; return other URLs unchanged."""
    parsed = urlparse(uri)
    return unquote(parsed.path) if parsed.scheme == "file" else uri


def _check_task(path: str, task: FileScanTask) -> None:
    if task.delete_files:
        refuse_deleted_rows(path, "rewrite its data files, which applies the deletes")
    if str(task.file.file_format).rpartition(".")[2].upper() != "PARQUET":
        raise DataError(f"{path} has data files that are not Parquet: {task.file.file_path}")


def _check_names(file: str, schema: Schema) -> None:
    """Raise DataError if field ids show that a column was renamed, or dropped and added again,
    after a file was written."""
    try:
        with store_of(file).open(file) as opened:
            fields = pq.read_schema(opened)
    except (OSError, pa.ArrowException):
        return  # ParquetFormat reports the error
    wanted = {number: field.name for number, field in index_by_id(schema).items()}
    top = {field.name: field.field_id for field in schema.fields}
    for number, name, is_top in _numbered(fields, is_top=True):
        if wanted.get(number, name) != name or (is_top and top.get(name, number) != number):
            shown = format_value(wanted.get(number, name))
            raise DataError(
                f"{file} was written before column {shown} of the table was renamed or replaced",
                hint="rewrite the table's data files",
            )


def _numbered(fields: Iterable[pa.Field], *, is_top: bool) -> Iterator[tuple[int, str, bool]]:
    """Yield field ids and names of columns and of nested struct fields."""
    for field in fields:
        if _ID in (field.metadata or {}):
            yield int(field.metadata[_ID]), field.name, is_top
        inside = field.type
        while hasattr(inside, "value_field"):
            inside = inside.value_field.type
        if pa.types.is_struct(inside):
            yield from _numbered(inside, is_top=False)
