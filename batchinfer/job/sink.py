"""Finished rows, in whatever order they come, to parts in input order."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from batchinfer.job.manifest import Part
from batchinfer.job.output import OutputDir
from batchinfer.job.rows import FinishedRow
from batchinfer.job.source import Source
from batchinfer.job.stats import requests_table
from batchinfer.job.table import OutputTable


class Sink:
    """Collects finished rows and writes each part when its last row, and every part before it, is
    there.

    Rows of unfinished parts are held in memory: about as many as an ``order_window``. The kept
    input columns are not; they are read again, part after part.

    Args:
        out: where parts go.
        parts: the parts to make, in order.
        table: their columns.
        source: where the kept columns come from.
        metadata: key-value metadata of every part.
        before_commit: called before each part is written.
    """

    def __init__(
        self,
        out: OutputDir,
        parts: Sequence[Part],
        table: OutputTable,
        source: Source,
        metadata: Mapping[str, str],
        before_commit: Callable[[], None],
    ) -> None:
        self._out = out
        self._parts = parts
        self._table = table
        self._kept = source.scan(list(table.kept), [part.rows for part in parts])
        self._metadata = dict(metadata)
        self._before_commit = before_commit
        self._rows: dict[int, FinishedRow] = {}
        self._first_rows = [part.rows.start for part in parts]
        self._missing = [len(part.rows) for part in parts]
        self._num_written = 0

    def add(self, row: FinishedRow) -> None:
        """Take a finished row; write the parts it completes.

        Raises:
            DataError: the kept columns of the input cannot be read.
            StorageError: a part cannot be written.
        """
        row_id: int = row.values["row_id"]
        assert row_id not in self._rows, f"row {row_id} finished twice"
        self._rows[row_id] = row
        self._missing[bisect_right(self._first_rows, row_id) - 1] -= 1
        self.write_complete()

    def write_complete(self) -> None:
        """Write the parts that lack no row, up to the first that does."""
        while self._num_written < len(self._parts) and self._missing[self._num_written] == 0:
            self._write(self._parts[self._num_written])
            self._num_written += 1

    def _write(self, part: Part) -> None:
        self._before_commit()
        rows = [self._rows.pop(row_id) for row_id in part.rows]
        table = self._table.columns(self._kept_of(part), [row.values for row in rows])
        codes = Counter(row.values["error"]["code"] for row in rows if row.values["error"])
        self._out.commit(
            part,
            table.replace_schema_metadata(self._metadata),
            requests_table((row.values["row_id"], row.stats) for row in rows),
            dict(sorted(codes.items())),
            sum(row.has_control_text for row in rows),
        )

    def _kept_of(self, part: Part) -> list[pa.RecordBatch]:
        """The part's kept columns; parts are asked for in order, batches end where parts end."""
        batches: list[pa.RecordBatch] = []
        missing = len(part.rows) if self._table.kept else 0
        while missing:
            _, batch = next(self._kept)
            batches.append(batch)
            missing -= len(batch)
        return batches
