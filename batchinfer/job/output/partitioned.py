"""Copies the finished output to folders named after column values (``output.partition_by``).

``_batchinfer/partitioned.json`` records the columns, and the size and hash of each file. The record
is written after the files. Missing or damaged files are written again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from batchinfer.console.format import format_value, listed, printable
from batchinfer.errors import DataError, LockedError, UsageError
from batchinfer.job.input.dataset import Source
from batchinfer.job.input.invalid_utf8 import with_valid_text
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.parquet_bytes import parquet_bytes
from batchinfer.job.output.records.export_record import file_problems, read_record
from batchinfer.job.output.records.file_record import missing_files
from batchinfer.job.output.schema import OutputTable
from batchinfer.job.row_ranges import Part
from batchinfer.job.storage.filesystem import storage_errors

MOST_PARTITIONS = 1024
"""Maximum number of partitions, as in pyarrow. Each part may write one file per partition."""
_COUNTED = 100_000
_MOST_BYTES = 255
"""Maximum length of a folder name in bytes."""
_NULL = "__HIVE_DEFAULT_PARTITION__"
_GENERATED = ("status",)

_Values = tuple[str | None, ...]
"""A partition's values as text; None is null."""


def check_partition_columns(columns: Sequence[str], table: OutputTable) -> None:
    """Check the names and types of the columns to partition by.

    Raises:
        UsageError: a column is neither a kept input column nor ``status``.
        DataError: a column has a type whose values cannot be folder names.
    """
    known = [*table.kept_schema.names, *_GENERATED]
    for name in columns:
        if name not in known:
            raise UsageError(
                f"output.partition_by: {format_value(name)} is neither a kept input column nor "
                "status",
                hint=f"choose from: {listed(known)}",
            )
        if name not in _GENERATED and not _can_name_folders(table.kept_schema.field(name).type):
            kind = printable(str(table.kept_schema.field(name).type), 120)
            raise DataError(
                f"output.partition_by: column {format_value(name)} is {kind}",
                hint="it must hold strings, whole numbers, dates or booleans",
            )


def _can_name_folders(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    numbers = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_date32)
    return any(test(kind) for test in (*texts, *numbers))


def check_partitions(columns: Sequence[str], kept: Mapping[str, str], source: Source) -> None:
    """Check that the input makes at most ``MOST_PARTITIONS`` partitions, and that its values can be
    folder names.

    Args:
        kept: maps each kept input column to its output column.

    Raises:
        DataError: there are too many partitions, a value is too long, or a value is the text that
            readers treat as null.
    """
    inputs = {name: column for column, name in kept.items() if name in columns}
    if not inputs:
        return
    partitions: set[_Values] = set()
    for _, batch in source.scan(list(inputs.values()), [source.rows_there]):
        partitions.update(_values_of(batch.columns))
        if len(partitions) > _COUNTED:
            break
    if len(partitions) > MOST_PARTITIONS:
        count = f"over {_COUNTED:,}" if len(partitions) > _COUNTED else f"{len(partitions):,}"
        raise DataError(
            f"output.partition_by: {listed(list(inputs))} would make {count} "
            f"partitions; at most {MOST_PARTITIONS:,} are allowed",
            hint="choose columns with fewer values",
        )
    for values in partitions:
        for name, value in zip(inputs, values, strict=True):
            if len(_folder_name(name, value)) > _MOST_BYTES:
                raise DataError(
                    f"output.partition_by: a value of {format_value(name)} is too "
                    f"long for a folder name: {printable(value or '', 60)}",
                    hint="choose another column",
                )
            if value == _NULL:  # readers would read it as null, because they compare decoded names
                raise DataError(
                    f"output.partition_by: {format_value(name)} has the value "
                    f"{_NULL}, which readers of partitioned data treat as null",
                    hint="make it null in the input, or choose another column",
                )


def refuse_foreign(out: OutputDir, columns: Sequence[str]) -> None:
    """Raise LockedError if the folder ``partitioned`` holds files that batchinfer did not write."""
    is_ours = out.files.stat(out.partitioned_record) is not None
    is_ours = is_ours or out.partitioned_record in missing_files(out)
    if columns and not is_ours and out.files.entries(out.partitioned):
        raise LockedError(
            f"{printable(str(out.partitioned))} was not written by batchinfer",
            hint="move it away, or use --output for another directory",
        )


def exists(out: OutputDir, columns: Sequence[str]) -> bool:
    """Return True if the output is partitioned by these columns and all files have their recorded
    size."""
    record = read_record(out, out.partitioned_record)
    if not columns:
        return not record
    return record.get("columns") == list(columns) and not list(_problems(out, read=False))


def names_of_files(out: OutputDir) -> list[str]:
    """Return the files' paths relative to ``partitioned``; none until all files are written."""
    return list(read_record(out, out.partitioned_record).get("files") or {})


def problems(out: OutputDir) -> Iterator[str]:
    """Yield the problems of written files, one per line; nothing while files are being written."""
    is_ended = out.files.stat(out.success) is not None
    if out.files.stat(out.partitioned_record) is None:
        return
    record = read_record(out, out.partitioned_record)
    if is_ended or record.get("files", {}) is not None:
        yield from _problems(out, read=True)


def _problems(out: OutputDir, *, read: bool) -> Iterator[str]:
    files = read_record(out, out.partitioned_record).get("files")
    if not isinstance(files, dict):
        yield f"{out.partitioned_record} is damaged or missing"
        return
    paths = {out.partitioned / name: facts for name, facts in files.items()}
    yield from file_problems(out, out.partitioned_record, paths, read=read)


def begin(out: OutputDir, columns: Sequence[str]) -> None:
    """Record that batchinfer made the folder ``partitioned``, whose files are not complete yet."""
    out.write_json(out.partitioned_record, {"columns": list(columns), "files": None})


def write_partitions(out: OutputDir, manifest: Manifest, columns: Sequence[str]) -> None:
    """Write ``partitioned/column=value/part-N.parquet`` of a job whose parts are all finished.

    Each partition file holds the rows of one part whose values match the file's path. The rows are
    in order, without the partition columns. The same parts always give the same bytes.

    Args:
        columns: the columns to partition by, outermost folder first; if there are none, the
            partitioned files are deleted.

    Raises:
        DataError: a part cannot be read.
        StorageError: a file cannot be written or deleted.
    """
    if columns:  # before files are deleted, record that batchinfer made the folder
        begin(out, columns)
    with storage_errors(out.partitioned, "delete"):
        out.files.delete(out.partitioned)
        out.files.sync(out.root)
    if not columns:
        with storage_errors(out.partitioned_record, "delete"):
            out.files.delete(out.partitioned_record)
        return
    files: dict[str, dict[str, Any]] = {}
    for part in manifest.parts():
        for path, table in _tables(out, part, columns):
            data = parquet_bytes([table])
            with storage_errors(path):
                out.files.make_directory(path.parent)
            out.write(path, data)
            name = "/".join(path.relative_to(out.partitioned).parts)
            files[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    out.write_json(out.partitioned_record, {"columns": list(columns), "files": files})


def _tables(
    out: OutputDir, part: Part, columns: Sequence[str]
) -> Iterator[tuple[PurePath, pa.Table]]:
    """Yield the file path and the rows of each partition that has rows in a part."""
    table = out.read_part(part)
    rows_of: dict[_Values, list[int]] = {}
    for row, values in enumerate(_values_of([table[name] for name in columns])):
        rows_of.setdefault(values, []).append(row)
    rest = table.drop_columns(list(columns))
    for values, rows in rows_of.items():
        named = zip(columns, values, strict=True)
        folder = out.partitioned.joinpath(*(_folder_name(*pair) for pair in named))
        yield folder / f"{part.name}.parquet", rest.take(rows)


def _values_of(columns: Sequence[pa.Array | pa.ChunkedArray]) -> list[_Values]:
    texts = [_as_text(column).to_pylist() for column in columns]
    return list(zip(*texts, strict=True))


def _as_text(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return with_valid_text(array).cast(pa.string())


def _folder_name(column: str, value: str | None) -> str:
    """Return the folder of a value in Hive's style, with special characters percent-encoded."""
    if value is None:
        return f"{quote(column, safe='')}={_NULL}"
    return f"{quote(column, safe='')}={quote(value, safe=' ')}"
