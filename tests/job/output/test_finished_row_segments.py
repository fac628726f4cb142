"""Segments: finished rows of unfinished parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.request import RequestStats
from batchinfer.errors import DataError
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.finished_row_segments import Segments, segment_table
from batchinfer.job.output.schema import ERROR
from batchinfer.job.row_ranges import Part
from batchinfer.job.rows.finished_row import FinishedRow
from tests.job.datasets import flip_bit
from tests.job.fakes import begin, for_writer

GENERATED = pa.schema(
    [("row_id", pa.int64()), ("text", pa.string()), ("status", pa.string()), ("error", ERROR)]
)
PLAN = Manifest("f", {}, (), (), 12, 4, "2026-11-20T10:00:00")
PARTS = PLAN.parts()


@pytest.fixture
def out(tmp_path: Path) -> OutputDir:
    out = OutputDir(tmp_path / "out")
    begin(out, PLAN, "overwrite")
    return out


def rows(*row_ids: int, status: str = "ok", text: str = "answer") -> pa.Table:
    finished = [
        FinishedRow(
            {"row_id": row_id, "text": f"{text} {row_id}", "status": status},
            RequestStats(prompt_tokens=row_id),
            row_id % 2 == 1,
        )
        for row_id in row_ids
    ]
    return segment_table(finished, Segments(OutputDir(Path()), PLAN, (), GENERATED).schema)


def texts(segments: Segments, part: Part) -> list[tuple[int, str]]:
    table = segments.rows_of(part)
    return list(zip(table["row_id"].to_pylist(), table["text"].to_pylist(), strict=True))


def files(out: OutputDir) -> list[str]:
    """Return the names of segments without their hashes."""
    return [path.name.rpartition("-")[0] for path in out.files.entries(out.segments)]


def only_file(out: OutputDir) -> Path:
    [path] = out.files.entries(out.segments)
    assert isinstance(path, Path)
    return path


@settings(max_examples=25)
@given(batches=st.lists(st.sets(st.integers(0, 11), min_size=1), max_size=5))
def test_segments_round_trip(out: OutputDir, batches: list[set[int]]) -> None:
    for path in out.files.entries(out.segments):
        path.unlink()
    segments = Segments(out, PLAN, PARTS, GENERATED)
    for number, batch in enumerate(batches):
        segments.add(rows(*batch, text=f"from {number}:"))
    again = Segments(out, PLAN, PARTS, GENERATED)
    found, damaged = again.recover()
    assert found.tolist() == sorted(set().union(*batches))
    assert damaged == {}
    latest = {row_id: number for number, batch in enumerate(batches) for row_id in batch}
    for part in PARTS:
        expected = [(row, f"from {latest[row]}: {row}") for row in part.rows if row in latest]
        assert texts(segments, part) == texts(again, part) == expected


def test_segments_keep_statistics_and_marks(out: OutputDir) -> None:
    segments = Segments(out, PLAN, PARTS, GENERATED)
    segments.add(rows(5, 4))
    table = segments.rows_of(PARTS[1])
    assert [request["prompt_tokens"] for request in table["request"].to_pylist()] == [4, 5]
    assert table["has_control_text"].to_pylist() == [False, True]


def test_segment_is_deleted_with_its_last_part(out: OutputDir) -> None:
    segments = Segments(out, PLAN, PARTS, GENERATED)
    segments.add(rows(0, 9))
    segments.add(rows(1))
    segments.drop(PARTS[0])
    assert files(out) == ["segment-000000"]
    segments.drop(PARTS[1])
    assert texts(segments, PARTS[2]) == [(9, "answer 9")]
    segments.drop(PARTS[2])
    assert files(out) == []


def test_segments_of_finished_parts_are_deleted_and_numbers_are_not_reused(out: OutputDir) -> None:
    segments = Segments(out, PLAN, PARTS, GENERATED)
    segments.add(rows(0, 9))
    segments.add(rows(1))
    left = Segments(out, PLAN, PARTS[1:], GENERATED)
    found, _ = left.recover()
    assert found.tolist() == [9]
    left.add(rows(4))
    assert files(out) == ["segment-000000", "segment-000002"]


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: flip_bit(path, 60),
        lambda path: pq.write_table(pa.table({"row_id": [1]}), path),
    ],
)
def test_damaged_segment_is_reported_and_deleted(out: OutputDir, harm) -> None:
    segments = Segments(out, PLAN, PARTS, GENERATED)
    segments.add(rows(0))
    harmed = only_file(out)
    segments.add(rows(1))
    harm(harmed)
    found, damaged = Segments(out, PLAN, PARTS, GENERATED).recover()
    assert found.tolist() == [1]
    assert list(damaged) == [harmed.name]
    assert files(out) == ["segment-000001"]


def test_any_changed_byte_of_a_segment_is_noticed(out: OutputDir) -> None:
    Segments(out, PLAN, PARTS, GENERATED).add(rows(0, 9))
    path = only_file(out)
    data = path.read_bytes()
    for at in range(0, len(data), 97):
        path.write_bytes(data)
        flip_bit(path, at)
        found, damaged = Segments(out, PLAN, PARTS, GENERATED).recover()
        assert (found.tolist(), list(damaged)) == ([], [path.name])


def test_segment_damaged_during_the_run(out: OutputDir) -> None:
    segments = Segments(out, PLAN, PARTS, GENERATED)
    segments.add(rows(0))
    only_file(out).write_bytes(b"zork")
    with pytest.raises(DataError, match=r"segment-000000-\w+\.parquet cannot be read"):
        segments.rows_of(PARTS[0])


def test_forget_errors_keeps_good_rows(out: OutputDir) -> None:
    segments = Segments(out, PLAN, PARTS, GENERATED)
    mixed = pa.concat_tables([rows(0, 9), rows(1, 8, status="error")])
    for table in (mixed, rows(2), rows(3, status="error")):
        segments.add(table)
    segments.forget_errors()
    found, _ = Segments(out, PLAN, PARTS, GENERATED).recover()
    assert found.tolist() == [0, 2, 9]
    assert texts(segments, PARTS[2]) == [(9, "answer 9")]


def test_late_segment_of_another_plan_is_ignored(out: OutputDir) -> None:
    """A frozen run with the same columns may write such a segment."""
    for late in (replace(PLAN, fingerprint="g"), replace(PLAN, planned_at="2026-11-20T10:00:01")):
        Segments(out, late, PARTS, GENERATED).add(rows(0, text="other"))
    Segments(out, PLAN, PARTS, GENERATED).add(rows(1))
    assert len(files(out)) == 3, "their names differ"
    found, damaged = Segments(out, PLAN, PARTS, GENERATED).recover()
    assert found.tolist() == [1]
    assert list(damaged.values()) == ["it belongs to another plan"] * 2
    assert len(files(out)) == 1


def of_writer(out: OutputDir, writer: str, parts: list[Part], owned: range) -> Segments:
    return Segments(for_writer(out, writer), PLAN, parts, GENERATED, owned)


def test_writer_reads_and_deletes_only_its_own_segments(out: OutputDir) -> None:
    of_writer(out, "s0001of2", PARTS[1:], range(1, 3)).add(rows(4))
    harmed = only_file(out)
    harmed.write_bytes(b"zork")
    Segments(out, PLAN, PARTS, GENERATED).add(rows(0, 8))
    one = of_writer(out, "s0000of2", PARTS[:1], range(1))
    assert [found.tolist() for found in (one.recover()[0],)] == [[0]]
    assert one.recover()[1] == {}, "it has not read the other writer's segment"
    one.drop(PARTS[0])
    assert len(files(out)) == 2, "both segments have rows of the other writer"
    two = of_writer(out, "s0001of2", PARTS[1:], range(1, 3))
    found, damaged = two.recover()
    assert (found.tolist(), list(damaged)) == ([8], [harmed.name])
    two.drop(PARTS[2])
    Segments(out, PLAN, (), GENERATED).recover()
    assert files(out) == []


def test_segment_deleted_by_another_writer_is_not_damaged(
    out: OutputDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    Segments(out, PLAN, PARTS, GENERATED).add(rows(0))
    listed = out.files.entries(out.segments)
    only_file(out).unlink()
    monkeypatch.setattr(out.files, "entries", lambda folder: listed)
    found, damaged = Segments(out, PLAN, PARTS, GENERATED).recover()
    assert (found.tolist(), damaged) == ([], {})


@given(data=st.data())
def test_no_row_of_several_writers_is_lost(out: OutputDir, data: st.DataObject) -> None:
    """Writers of disjoint parts add rows, finish parts, die and restart, in any order."""
    for path in out.files.entries(out.segments):
        path.unlink()
    owned = [range(1), range(1, 3)]
    unfinished, kept = set(range(3)), set[int]()
    lone = Segments(out, PLAN, PARTS, GENERATED)

    def begin_again(at: int) -> Segments:
        parts = [part for part in PARTS if part.index in unfinished and part.index in owned[at]]
        writer = of_writer(out, f"s{at:04d}of2", parts, owned[at])
        found, damaged = writer.recover()
        mine = {row for part in parts for row in part.rows}
        assert (set(found.tolist()), damaged) == (kept & mine, {})
        return writer

    first = data.draw(st.sets(st.integers(0, 11)), "of a run alone")
    if first:
        lone.add(rows(*first))
        kept |= first
    writers = [begin_again(at) for at in range(2)]
    steps = st.tuples(st.integers(0, 1), st.sampled_from(["add", "finish", "die"]))
    for at, what in data.draw(st.lists(steps, max_size=12), "steps"):
        mine = [part for part in PARTS if part.index in unfinished and part.index in owned[at]]
        left = [row for part in mine for row in part.rows if row not in kept]
        if what == "die":
            writers[at] = begin_again(at)
        elif what == "add" and left:
            some = data.draw(st.sets(st.sampled_from(left), min_size=1), "rows")
            writers[at].add(rows(*some))
            kept |= some
        elif what == "finish" and mine:
            [part, *_] = mine
            there = [row for row, _ in texts(writers[at], part)]
            assert there == [row for row in part.rows if row in kept]
            writers[at].drop(part)
            unfinished.discard(part.index)
    alone = Segments(out, PLAN, [part for part in PARTS if part.index in unfinished], GENERATED)
    found, damaged = alone.recover()
    needed = {row for index in unfinished for row in PARTS[index].rows}
    assert (set(found.tolist()), damaged) == (kept & needed, {})
    Segments(out, PLAN, (), GENERATED).recover()
    assert files(out) == []
