from __future__ import annotations

import bz2
import csv
import gzip
import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchinfer.errors import DataError, RowError
from batchinfer.job.input.dataset import Source, open_source
from batchinfer.job.input.formats import csv as csv_format
from batchinfer.job.input.formats import text_file
from batchinfer.job.input.formats.options import TextOptions
from batchinfer.job.input.invalid_utf8 import with_valid_text
from batchinfer.job.input.unique_ids import find_bad_ids


def source(tmp_path: Path, *files: bytes, suffix: str = ".csv", **options: Any) -> Source:
    for at, content in enumerate(files):
        (tmp_path / f"{at}{suffix}").write_bytes(content)
    return open_source(str(tmp_path), **options)


def kept(found: Source) -> list[dict[str, Any]]:
    batches = found.scan(found.schema.names, [found.rows_there])
    return [row for _, batch in batches for row in batch.to_pylist()]


def seen(found: Source) -> list[dict[str, Any] | str]:
    """Return the rows that prompts are made of; for a bad row, its error message."""
    pieces = found.rows(found.schema.names, [found.rows_there])
    rows = [row for _, piece in pieces for row in piece]
    return [r.message.partition("csv, ")[2] if isinstance(r, RowError) else dict(r) for r in rows]


def test_csv_cells_with_quotes_and_newlines(tmp_path: Path) -> None:
    text = 'id,text\r\n1,"say ""yes"", or\r\nno"\r\n\r\n2,"a,b"\r\n3,plain "quote"'
    expected = ['say "yes", or\r\nno', "a,b", 'plain "quote"']
    found = source(tmp_path, text.encode())
    assert kept(found) == [{"id": at, "text": t} for at, t in enumerate(expected, 1)]
    assert [row["text"] for row in seen(found)] == [t.encode() for t in expected]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_all_line_endings_are_read(tmp_path: Path, end: str) -> None:
    found = source(tmp_path, end.join(["a,b", "1,x", "", "2,y", ""]).encode())
    assert kept(found) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


def test_a_column_is_numeric_only_if_no_value_changes(tmp_path: Path) -> None:
    columns = {
        "whole": (["1", "-20", ""], pa.int64()),
        "float": (["0.5", "-1e-07", "3.0"], pa.float64()),
        "zeros": (["007", "1", "2"], pa.string()),
        "digits": (["1.10", "1.2", "1.3"], pa.string()),
        "mixed": (["1", "1.5", "2"], pa.string()),
        "large": (["12345678901234567890", "1", "2"], pa.string()),
        "empty": (["", "", ""], pa.string()),
        "minus": (["-0", "1", "2"], pa.string()),
        "nan": (["nan", "1.5", "2.5"], pa.string()),
        "space": ([" 1", "1", "2"], pa.string()),
    }
    rows = [list(columns), *zip(*(cells for cells, _ in columns.values()), strict=True)]
    found = source(tmp_path, "\n".join(map(",".join, rows)).encode())
    assert found.schema.types == [kind for _, kind in columns.values()]
    for name, (cells, _) in columns.items():
        shown = [row[name] for row in seen(found)]
        assert [v.decode() if isinstance(v, bytes) else str(v) for v in shown] == cells


def test_files_of_one_dataset_share_column_types(tmp_path: Path) -> None:
    files = (b"a,b\n1,1\n", b"a,b\nx,2\n", b"b,a\n3,\n")
    found = source(tmp_path, *files)
    assert found.schema == pa.schema([("a", pa.string()), ("b", pa.int64())])
    assert kept(found) == [{"a": "1", "b": 1}, {"a": "x", "b": 2}, {"a": None, "b": 3}]
    found = source(tmp_path, b"a\n1\n", mode="strict")
    with pytest.raises(DataError, match=r'column "b"(.|\n)*set input\.schema: union'):
        found.require_alike(["b"])
    assert kept(source(tmp_path, b"a\n1\n", mode="union"))[0] == {"a": "1", "b": None}


def test_an_empty_cell_is_null_and_an_empty_text_in_a_prompt(tmp_path: Path) -> None:
    found = source(tmp_path, b'id,n,sampling_params\n,1,\n"",,{}\nx,2,\n')
    assert [row["id"] for row in kept(found)] == [None, None, "x"]
    assert [row["id"] for row in seen(found)] == [b"", b"", b"x"]
    assert [row["n"] for row in seen(found)] == [1, b"", 2]
    assert [row["sampling_params"] for row in seen(found)] == [None, b"{}", None]
    assert find_bad_ids(found, "id").rows.tolist() == [0, 1]


def test_a_wrong_record_is_a_row_error_with_its_line(tmp_path: Path) -> None:
    text = b'a,b\n1,"x\ny"\n2\n3,z,\n"4"q,z\n6,\0\n'
    found = source(tmp_path, text)
    assert seen(found) == [
        {"a": 1, "b": b"x\ny"},
        "line 4 has 1 cells, but its header has 2",
        "line 5 has 3 cells, but its header has 2",
        "line 6: ',' expected after '\"'",
        {"a": 6, "b": b"\0"},
    ]
    [(_, rows)] = found.rows(["a"], [range(1, 2)])
    assert [row.code for row in rows] == ["invalid_csv"]
    [(_, batch)] = found.scan(["a"], [range(5)])
    assert batch["a"].to_pylist() == [1, None, None, None, 6]


def test_a_header_alone_is_a_dataset_without_rows(tmp_path: Path) -> None:
    found = source(tmp_path, b"a,,c\n")
    assert (found.num_rows, found.schema.names) == (0, ["a", "column1", "c"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty and has no header"),
        (b"a;b\n1;2\n", r'the header has no ",": a;b\nset input\.delimiter: ";"'),
        (b'a,b\n1,2\n3,"x\n4,5\n', r"line 3: a quote is never closed"),
        (b"a,b\n1\n2\n", r"is not valid CSV: .*line 2 has 1 cells"),
        (b'"a"b,c\n1,2\n', r"line 1: ',' expected"),
        (b'a,b\n1,"' + b"x\n" * 3000, r"line 2: a quote is never closed"),
        (b"a,b\n1," + b"x" * 30_000, r"a line of more than"),
        (b"\x1f\x8b\x08garbage", "cannot be read"),
        (b"PAR1\0\0\0", "is not a header, because it contains a NUL"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, content: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_format, "MAX_CELL_BYTES", 2000)
    before = csv.field_size_limit(2000)
    monkeypatch.setattr(text_file, "_CHUNK", 1000)
    try:
        with pytest.raises(DataError, match=rf"0\.csv.*{message}"):
            source(tmp_path, content)
    finally:
        csv.field_size_limit(before)


@pytest.mark.parametrize(
    "huge", [b"x" * 3000, b'"' + b"x" * 3000 + b'"', b'"' + b'""said"",\n' * 500 + b'"']
)
def test_only_the_row_with_a_huge_cell_is_an_error(
    tmp_path: Path, huge: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_format, "MAX_CELL_BYTES", 2000)
    before = csv.field_size_limit(2000)
    try:
        found = source(tmp_path, b"a,b\n1,x\n2," + huge + b'\n3,"y\nz"\n4,w\n')
        rows = seen(found)
    finally:
        csv.field_size_limit(before)
    assert rows == [
        {"a": 1, "b": b"x"},
        "line 3: a cell has more than 0 MiB",
        {"a": 3, "b": b"y\nz"},
        {"a": 4, "b": b"w"},
    ]


def test_csv_with_tabs_byte_order_marks_and_compression(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbfa\tb\n1\tx,y\n"
    for at, (end, pack) in enumerate(
        {
            "": bytes,
            ".gz": gzip.compress,
            ".bz2": bz2.compress,
            ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
        }.items()
    ):
        (tmp_path / f"{at}.tsv{end}").write_bytes(pack(text))
    found = open_source(str(tmp_path))
    assert kept(found) == [{"a": 1, "b": "x,y"}] * 4
    assert len({file.content_sha256 for file in found.files}) == 1


def test_csv_next_to_json_lines_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("a\n1\n")
    (tmp_path / "x.jsonl").write_text('{"a": 2}\n')
    assert kept(open_source(str(tmp_path))) == [{"a": 2}]
    assert kept(open_source(str(tmp_path), format_name="csv")) == [{"a": 1}]
    assert kept(open_source(f"{tmp_path}/*.csv")) == [{"a": 1}]


CELLS = st.text(st.sampled_from('a,"\r\n \0é1.'), max_size=5)


@given(
    rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=8),
    chunk=st.integers(1, 9),
    end=st.sampled_from(["\n", "\r\n"]),
    batch=st.integers(1, 3),
)
@example(rows=[("", "")], chunk=1, end="\n", batch=1)
def test_cells_survive_any_chunk_size(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[tuple[str, str]],
    chunk: int,
    end: str,
    batch: int,
) -> None:
    monkeypatch.setattr(text_file, "_CHUNK", chunk)
    monkeypatch.setattr(text_file, "BATCH_ROWS", batch)
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator=end, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    found = source(tmp_path, file.getvalue().encode())
    values = [tuple(str(v if v is not None else "") for v in row.values()) for row in kept(found)]
    assert values == rows
    for first in range(len(rows)):
        [(row, piece)] = found.rows(["b"], [range(first, first + 1)])
        value = piece[0]["b"]  # type: ignore[index]
        assert (row, value if isinstance(value, bytes) else str(value).encode()) == (
            first,
            rows[first][1].encode(),
        )


@given(content=st.lists(st.sampled_from([b"a", b",", b'"', b"\n", b"\r", b"\xff"])).map(b"".join))
def test_random_bytes_are_rows_or_refused(tmp_path: Path, content: bytes) -> None:
    try:
        found = source(tmp_path, b"a,b\n" + content, options=TextOptions(encoding_errors="replace"))
    except DataError:
        return
    batches = found.scan(["b", "a"], [found.rows_there])
    columns = [batch["b"] for _, batch in batches]
    assert all(with_valid_text(column) is column for column in columns)
    assert sum(map(len, columns)) == found.num_rows
    assert len(seen(found)) == found.num_rows
