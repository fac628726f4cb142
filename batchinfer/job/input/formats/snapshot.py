"""Tables of Parquet files as input: Delta Lake and Apache Iceberg, as they are at one version.

A table is its Parquet files at that version, which are read as any others: what a file does not
have is null, and what later versions add or take away is not seen. Files with rows that are marked
as deleted, and columns that have other names in files than in the table, are refused: reading them
by name would give other rows than the table has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import pyarrow as pa

from batchinfer.console.format import first_line
from batchinfer.errors import DataError
from batchinfer.job.input.format import Format, InputFile
from batchinfer.job.input.hive_partitions import HiveFormat
from batchinfer.job.input.parquet import ParquetFormat
from batchinfer.job.input.union import UnitedFormat, widened


@dataclass(frozen=True)
class Snapshot:
    """A table at one version."""

    path: str
    version: int
    """Delta: the version; Iceberg: the snapshot's id."""
    schema: pa.Schema
    partitions: Mapping[str, Mapping[str, str | None]]
    """Its files in order, each with the columns whose values it has from the table's log."""

    @property
    def files(self) -> list[str]:
        """Paths of its files."""
        return list(self.partitions)

    def format(self) -> Format:
        """What reads its files."""
        own = [f for f in self.schema if f.name not in self._partition_columns]
        inner = SnapshotFormat(pa.schema(own))
        if not self._partition_columns:
            return inner
        return HiveFormat(inner, self.partitions, self._partition_columns)

    @property
    def _partition_columns(self) -> dict[str, pa.DataType]:
        first: Mapping[str, object] = next(iter(self.partitions.values()), {})
        return {name: self.schema.field(name).type for name in first}

    def check(self) -> None:
        """Check that there is something to read.

        Raises:
            DataError: the table has no files.
        """
        if not self.partitions:
            raise DataError(f"{self.path} has no rows at version {self.version}")


class SnapshotFormat(UnitedFormat):
    """Parquet files of a table, with the table's columns.

    Args:
        schema: of the table.
    """

    def __init__(self, schema: pa.Schema) -> None:
        super().__init__(ParquetFormat(), "union", widened)
        self._schema = schema

    def common_schema(self, files: Sequence[InputFile], schemas: Sequence[pa.Schema]) -> pa.Schema:
        """The table's columns, whatever else is in files."""
        super().common_schema(files, schemas)
        self.differences.clear()
        return self._schema


def refuse(path: str, kind: str, error: BaseException) -> NoReturn:
    """Say that a table cannot be read.

    Raises:
        DataError: always.
    """
    raise DataError(
        f"{path} cannot be read as a table ({kind}): {first_line(error)}",
        hint="check the path, input.version, and that the files it needs are still there",
    ) from error


def refuse_deleted_rows(path: str, hint: str) -> NoReturn:
    """Say that a table has rows that its files have and it has not.

    Raises:
        DataError: always.
    """
    raise DataError(
        f"{path} has rows that are deleted but still in its files, which this version cannot "
        "leave out",
        hint=hint,
    )
