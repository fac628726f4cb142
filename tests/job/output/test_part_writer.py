from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.request import RequestStats
from batchinfer.errors import StorageError
from batchinfer.job.input.dataset import open_source
from batchinfer.job.manifest import Manifest
from batchinfer.job.output import part_writer as sink
from batchinfer.job.output.commit import publish
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.finished_row_segments import Segments
from batchinfer.job.output.part_writer import PartWriter
from batchinfer.job.output.schema import output_table
from batchinfer.job.row_ranges import NO_ROWS, Part
from batchinfer.job.rows.finished_row import FinishedRow
from batchinfer.job.storage.filesystem import LocalFiles
from tests.job.datasets import write_parquet
from tests.job.fakes import begin, job

NOW = "2026-11-20T10:00:00"


def finished(row_id: int, code: str | None = None) -> FinishedRow:
    values: dict[str, Any] = {
        "row_id": row_id,
        "generated_text": None if code else f"answer {row_id}",
        "outputs": [],
        "status": "error" if code else "ok",
        "error": {"code": code, "message": "why"} if code else None,
    }
    return FinishedRow(values, None if code else RequestStats(prompt_tokens=row_id), False)


class Fixture:
    """An input of ``num_rows`` rows, and a writer for its unfinished parts."""

    def __init__(self, path: Path, num_rows: int, rows_per_part: int, done: set[int]) -> None:
        prompts = [f"prompt {row}" for row in range(num_rows)]
        write_parquet(path / "in" / "x.parquet", {"prompt": prompts}, rows_per_group=7)
        spec = job(path, output={"rows_per_part": rows_per_part})
        source = open_source(spec.input.paths)
        manifest = Manifest("f", {}, (), source.files, num_rows, rows_per_part, NOW)
        self.plan = manifest
        self.out = OutputDir(path / "out")
        self.parts = [
            part for part in begin(self.out, manifest, "overwrite") if part.index not in done
        ]
        self.commits = 0
        self.table = table = output_table(source, spec)
        self.now = 0.0
        self.segments = Segments(self.out, manifest, self.parts, table.generated_schema)
        self.sink = PartWriter(
            self.out,
            self.parts,
            self.segments,
            NO_ROWS,
            table,
            source,
            {"k": "v"},
            self._count,
            partial(publish, self.out),
            lambda: self.now,
        )

    def _count(self) -> None:
        self.commits += 1

    def segment_rows(self) -> list[int]:
        """Return the ids of the rows in segments."""
        segments = Segments(self.out, self.plan, self.parts, self.table.generated_schema)
        return segments.recover()[0].tolist()

    def files(self) -> list[Path]:
        return sorted(self.out.data.iterdir())


@pytest.fixture
def five(tmp_path: Path) -> Fixture:
    """Return a writer for five rows in parts of two."""
    return Fixture(tmp_path, 5, 2, set())


def rows_of(path: Path) -> list[tuple[int, str, str | None]]:
    table = pq.read_table(path)
    columns = (table[name].to_pylist() for name in ("row_id", "prompt", "generated_text"))
    return list(zip(*columns, strict=True))


@settings(max_examples=20)
@given(data=st.data(), num_rows=st.integers(1, 30), rows_per_part=st.integers(1, 12))
def test_rows_are_written_once_in_input_order(
    tmp_path: Path, data: st.DataObject, num_rows: int, rows_per_part: int
) -> None:
    num_parts = -(-num_rows // rows_per_part)
    done = data.draw(st.sets(st.integers(0, num_parts - 1)))
    fixture = Fixture(tmp_path, num_rows, rows_per_part, done)
    row_ids = [row_id for part in fixture.parts for row_id in part.rows]
    for row_id in data.draw(st.permutations(row_ids)):
        fixture.sink.add(finished(row_id))
    assert [path.stem for path in fixture.files()] == [part.name for part in fixture.parts]
    for path, part in zip(fixture.files(), fixture.parts, strict=True):
        assert rows_of(path) == [(i, f"prompt {i}", f"answer {i}") for i in part.rows]


def test_part_waits_for_earlier_parts(five: Fixture) -> None:
    for row_id in (2, 3, 4, 0):
        five.sink.add(finished(row_id))
    assert five.files() == []
    five.sink.add(finished(1))
    assert len(five.files()) == 3
    assert five.commits == 3


def test_held_rows_are_flushed_every_few_seconds(five: Fixture) -> None:
    five.sink.add(finished(4))
    five.now = LocalFiles.flush_every_s - 0.1
    five.sink.flush_if_due()
    assert five.segment_rows() == []
    five.now = LocalFiles.flush_every_s
    five.sink.flush_if_due()
    assert five.segment_rows() == [4]
    five.sink.add(finished(3))
    five.sink.flush_if_due()
    assert five.segment_rows() == [4], "the next flush is a few seconds later"


def test_many_held_rows_are_flushed_at_once(five: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "FLUSH_ROWS", 2)
    five.sink.add(finished(4))
    five.sink.flush_if_due()
    assert five.segment_rows() == []
    five.sink.add(finished(3))
    five.sink.flush_if_due()
    assert five.segment_rows() == [3, 4]


def test_part_combines_segments_and_rows_in_memory(five: Fixture) -> None:
    for row_id in (4, 1, 3):
        five.sink.add(finished(row_id))
        five.sink.flush()
    five.sink.add(finished(2))
    five.sink.add(finished(0, "empty_prompt"))
    texts = [text for path in five.files() for _, _, text in rows_of(path)]
    assert texts == [None, "answer 1", "answer 2", "answer 3", "answer 4"]
    assert five.segment_rows() == []
    statistics = pq.read_table(five.out.request_stats(five.parts[1]))
    assert statistics["prompt_tokens"].to_pylist() == [2, 3]


def test_steps_are_written_before_rows(five: Fixture) -> None:
    five.sink.add(finished(4))
    five.sink.flush()
    assert five.commits == 1
    for row_id in (0, 1):
        five.sink.add(finished(row_id))
    assert five.commits == 2


def test_part_that_reads_back_wrong_is_not_finished(
    five: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = LocalFiles.write

    def write_badly(self: LocalFiles, path: Path, data: bytes) -> None:
        flipped = bytes([*data[:90], data[90] ^ 1, *data[91:]])
        write(self, path, flipped if path.name == "part-00000.parquet" else data)

    five.sink.add(finished(0))
    monkeypatch.setattr(LocalFiles, "write", write_badly)
    with pytest.raises(StorageError, match="reading it back failed"):
        five.sink.add(finished(1))
    assert five.files() == []
    monkeypatch.undo()
    five.sink.flush()
    assert five.segment_rows() == [0, 1]


def test_part_metadata_and_page_checksums(five: Fixture) -> None:
    for row_id in range(2):
        five.sink.add(finished(row_id))
    path = five.files()[0]
    assert pq.read_schema(path).metadata == {b"k": b"v"}
    pq.read_table(path, page_checksum_verification=True)
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"


def test_part_without_kept_columns(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["a", "b"]})
    spec = job(tmp_path, input={"path": str(tmp_path / "in"), "keep_columns": []})
    source = open_source(spec.input.paths)
    out = OutputDir(tmp_path / "out")
    plan = Manifest("f", {}, (), source.files, 2, 2, NOW)
    begin(out, plan)
    table = output_table(source, spec)
    parts = [Part(0, range(2))]
    segments = Segments(out, plan, parts, table.generated_schema)
    sink = PartWriter(
        out, parts, segments, NO_ROWS, table, source, {}, lambda: None, partial(publish, out)
    )
    for row_id in (1, 0):
        sink.add(finished(row_id))
    written = pq.read_table(out.data / "part-00000.parquet")
    assert written.schema.names == table.generated_schema.names
    assert written["row_id"] == pa.chunked_array([[0, 1]])


def test_closed_input_file_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "_MOST_KEPT_BYTES", 40)  # fits two rows, not three
    fixture = Fixture(tmp_path, 20, 3, done={2})
    for part in fixture.parts:
        for row_id in part.rows:
            fixture.sink.add(finished(row_id))
    for part in fixture.parts:
        kept = pq.read_table(fixture.out.part_file(part))["prompt"].to_pylist()
        assert kept == [f"prompt {row}" for row in part.rows]
