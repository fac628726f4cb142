"""The files of a Delta Lake or Apache Iceberg table at one version.

The files are read as plain Parquet files, and missing columns are filled with null. Plain reads
would be wrong for a table that marks rows as deleted or renames columns, so batchinfer refuses such
tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import pyarrow as pa

from batchinfer.console.format import first_line
from batchinfer.errors import DataError


@dataclass(frozen=True)
class Snapshot:
    version: int
    """Version of a Delta table, or snapshot id of an Iceberg table."""
    schema: pa.Schema
    """The table's columns; partition columns come last."""
    partitions: Mapping[str, Mapping[str, str | None]]
    """Values of the partition columns from the table's log, keyed by file path, in file order."""


def refuse(path: str, kind: str, error: BaseException) -> NoReturn:
    raise DataError(
        f"{path} cannot be read as a table ({kind}): {first_line(error)}",
        hint="check the path and input.version, and check that no file of the table was removed",
    ) from error


def refuse_deleted_rows(path: str, hint: str) -> NoReturn:
    """Raise a DataError, because files of a table hold rows that the table has deleted."""
    raise DataError(
        f"{path} has deleted rows that are still in its files; this version of batchinfer cannot "
        "skip them",
        hint=hint,
    )
