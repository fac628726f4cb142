"""Reading row groups in batches: large rows are read one by one."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from batchinfer.job.input.format import BATCH_ROWS
from batchinfer.job.input.parquet import open_parquet, row_group_batches
from tests.job.datasets import write_parquet

COLUMNS = {"text": ["x" * 70_000, "y" * 70_000, "z"], "n": [1, 2, 3]}


@pytest.mark.parametrize("columns", [["text", "n"], ["n"]])
@pytest.mark.parametrize("in_memory", [False, True])
def test_large_rows_are_read_one_by_one(
    tmp_path: Path, columns: list[str], in_memory: bool
) -> None:
    path = write_parquet(tmp_path / "x.parquet", COLUMNS, rows_per_group=2)
    file = pa.BufferReader(path.read_bytes()) if in_memory else pa.OSFile(str(path))
    metadata = open_parquet(file).metadata

    groups = [list(row_group_batches(file, metadata, at, columns)) for at in range(2)]

    assert [[len(batch) for batch in group] for group in groups] == [[1, 1], [1]]
    read = pa.Table.from_batches([batch for group in groups for batch in group])
    assert read == pa.table(COLUMNS).select(columns)


def test_small_rows_are_read_together(tmp_path: Path) -> None:
    numbers = {"n": list(range(BATCH_ROWS + 1))}
    path = write_parquet(tmp_path / "x.parquet", numbers, rows_per_group=2 * BATCH_ROWS)
    with pa.OSFile(str(path)) as file:
        batches = list(row_group_batches(file, open_parquet(file).metadata, 0, ["n"]))
    assert [len(batch) for batch in batches] == [BATCH_ROWS, 1]
