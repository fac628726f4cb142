"""The Arrow schema that a Parquet file stores in its metadata."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import DataError
from batchinfer.job.input.dataset import open_source
from batchinfer.job.input.parquet import check_arrow_schema
from tests.job.datasets import write_parquet

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
KINDS = (
    pa.string(),
    pa.string_view(),
    pa.null(),
    pa.timestamp("s"),
    pa.dictionary(pa.int8(), pa.string()),
    pa.list_(pa.int32(), 3),
    pa.large_list(pa.string()),
    pa.list_view(pa.string()),
    pa.map_(pa.string(), MESSAGES),
    MESSAGES,
    pa.struct([("a", MESSAGES), ("b", pa.struct([("c", pa.bool_())]))]),
    pa.uuid(),
    pa.json_(),
)


def written(schema: pa.Schema) -> pq.ParquetFile:
    file = BytesIO()
    pq.write_table(schema.empty_table(), file)
    return pq.ParquetFile(file)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_type_matches_its_own_schema(kind: pa.DataType) -> None:
    file = written(pa.schema([("x", kind), ("y", pa.int64())]))
    check_arrow_schema(file.metadata, file.schema_arrow)


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
def test_int96_times_match_a_schema_with_a_time_zone(zone: str | None) -> None:
    file = BytesIO()
    times = pa.array([1], pa.timestamp("us", zone))
    pq.write_table(pa.table({"x": times}), file, use_deprecated_int96_timestamps=True)
    reader = pq.ParquetFile(file)
    check_arrow_schema(reader.metadata, reader.schema_arrow)


@pytest.mark.parametrize(
    "other",
    [
        pa.schema([("x", pa.struct([("list", MESSAGES)]))]),
        pa.schema([("y", MESSAGES)]),
        pa.schema([("x", pa.list_(pa.struct([("role", pa.string()), ("text", pa.string())])))]),
        pa.schema([("x", MESSAGES), ("y", pa.int64())]),
    ],
)
def test_another_nesting_is_refused(other: pa.Schema) -> None:
    with pytest.raises(ValueError, match="do not match its Arrow schema"):
        check_arrow_schema(written(pa.schema([("x", MESSAGES)])).metadata, other)


def test_a_time_zone_of_invalid_utf8_is_refused_on_opening(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", {"x": pa.array([1], pa.timestamp("us", "UTC"))})
    kept = pq.read_metadata(path).metadata[b"ARROW:schema"]
    damaged = base64.b64encode(base64.b64decode(kept).replace(b"UTC", b"UT\xe3"))
    path.write_bytes(path.read_bytes().replace(kept, damaged))
    with pytest.raises(DataError, match=r"x\.parquet cannot be read as Parquet: 'utf-8' codec"):
        open_source(str(path))
