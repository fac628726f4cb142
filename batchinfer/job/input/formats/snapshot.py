"""A table of Parquet files (Delta Lake, Apache Iceberg) at one version.

Its files are read like any others: a column that a file does not have is null. Tables with rows
marked as deleted, or with columns that have other names in files than in the table, are refused:
reading their files by name would give other rows than the table has.
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
    """A table at one version."""

    version: int
    """Delta: the version; Iceberg: the snapshot's id."""
    schema: pa.Schema
    """The table's columns, those of ``partitions`` last."""
    partitions: Mapping[str, Mapping[str, str | None]]
    """Paths of its files in order, each with the columns whose values are in the table's log."""


def refuse(path: str, kind: str, error: BaseException) -> NoReturn:
    """Raise DataError: a table cannot be read."""
    raise DataError(
        f"{path} cannot be read as a table ({kind}): {first_line(error)}",
        hint="check the path, input.version, and that the files it needs are still there",
    ) from error


def refuse_deleted_rows(path: str, hint: str) -> NoReturn:
    """Raise DataError: files of a table hold rows that the table does not."""
    raise DataError(
        f"{path} has rows that are deleted but still in its files, which this version cannot "
        "leave out",
        hint=hint,
    )
