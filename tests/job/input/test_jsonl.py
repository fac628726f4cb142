"""JSON Lines files are read like tables, even if lines are malformed."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from batchinfer.errors import DataError, ExitCode, RowError, UsageError
from batchinfer.job.input import jsonl
from batchinfer.job.input.dataset import open_source
from batchinfer.job.input.formats import text_file
from batchinfer.job.run.run_job import run_job
from tests.job.fakes import FakeBuild, job

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def write(path: Path, *rows: Any) -> Path:
    """Write a line per row: text and bytes unchanged, other values as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, bytes | str) else json.dumps(row) for row in rows]
    data = [line if isinstance(line, bytes) else line.encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in data))
    return path


def scanned(path: Path, *ranges: range) -> list[dict[str, Any]]:
    source = open_source(str(path))
    wanted = ranges or (range(source.num_rows),)
    return [
        row for _, batch in source.scan(source.schema.names, wanted) for row in batch.to_pylist()
    ]


def rows(path: Path) -> list[Any]:
    source = open_source(str(path))
    pieces = source.rows(source.schema.names, [range(source.num_rows)])
    return [row for _, piece in pieces for row in piece]


def codes(path: Path) -> list[str | None]:
    return [row.code if isinstance(row, RowError) else None for row in rows(path)]


# Values


def test_types_are_found_from_all_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.jsonl",
        {"a": 1, "b": None, "m": [{"role": "user", "content": "é"}]},
        *({"a": 2} for _ in range(2000)),
        {"a": 0.5, "b": "text", "m": [{"role": "tool", "name": "f"}]},
    )
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
    expected = pa.schema([("a", pa.float64()), ("b", pa.string()), ("m", pa.list_(message))])
    assert open_source(str(path)).schema == expected
    found = scanned(path)
    assert found[0]["m"] == [{"role": "user", "content": "é", "name": None}]
    assert found[-1]["a"] == 0.5


@pytest.mark.parametrize(
    "values", [["a", ["b"]], [{}, None], [1, "1"], [2**70], [{f"k{i}": i} for i in range(300)]]
)
def test_a_column_without_a_type_is_kept_as_json(tmp_path: Path, values: list[Any]) -> None:
    path = write(tmp_path / "x.jsonl", *({"v": value} for value in values))
    assert open_source(str(path)).schema.field("v").type == pa.string()
    kept = [row["v"] for row in scanned(path)]
    assert [text if text is None else json.loads(text) for text in kept] == values
    assert [row["v"] for row in rows(path)] == values


@given(objects=st.lists(st.dictionaries(st.sampled_from("ab"), VALUES), min_size=1, max_size=5))
def test_random_objects_survive_and_can_be_written(tmp_path: Path, objects: list[Any]) -> None:
    assume(any(objects))
    path = write(tmp_path / "x.jsonl", *objects)
    source = open_source(str(path))
    for found, written in zip(scanned(path), objects, strict=True):
        for field in source.schema:
            value = found[field.name]
            if field.metadata is not None and value is not None:
                value = json.loads(value)
            assert without_nulls(value) == without_nulls(written.get(field.name))
    batches = [batch for _, batch in source.scan(source.schema.names, [range(source.num_rows)])]
    pq.write_table(pa.Table.from_batches(batches), tmp_path / "x.parquet")


def without_nulls(value: Any) -> Any:
    """Convert a JSON value as Arrow's structs do: drop null keys, make whole numbers floats."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def test_files_may_have_different_keys(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.jsonl", {"x": 1})
    write(tmp_path / "in" / "b.ndjson", {"y": "b"}, {"x": 2.5})
    write(tmp_path / "in" / "c.jsonl")
    assert scanned(tmp_path / "in") == [
        {"x": 1.0, "y": None},
        {"x": None, "y": "b"},
        {"x": 2.5, "y": None},
    ]


# Lines


def test_blank_lines_are_not_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", b"\xef\xbb\xbf" + b'{"x": 0}\r', "", "  \t", {"x": 1}, "")
    assert scanned(path) == [{"x": 0}, {"x": 1}]


def test_a_bad_line_is_a_row_with_its_code_and_line_number(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.jsonl",
        {"x": 0},
        "",
        '{"x": "half',
        "[1, 2]",
        "null",
        '{"x": 1} {"x": 2}',
        "[" * 500,
        '{"x": "\\ud800"}',
        {"x": 3},
    )
    assert codes(path) == [None, *["invalid_json"] * 6, None]
    assert (
        rows(path)[1].message
        == f"{path}, line 3 is not JSON: EOF while parsing a string at byte 11"
    )
    assert rows(path)[2].message == f"{path}, line 4 is an array; it must be a JSON object"
    assert scanned(path) == [{"x": x} for x in [0, *[None] * 6, 3]]


def test_a_line_that_is_too_long_is_not_read(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 3000)
    monkeypatch.setattr(text_file, "_CHUNK", 100)
    long = {"x": "y" * 2980}
    path = write(tmp_path / "x.jsonl", {"x": "a"}, long, {"x": "y" * 10_000}, {"x": "b"})
    assert codes(path) == [None, None, "row_too_large", None]
    assert [row["x"] for row in scanned(path)] == ["a", long["x"], None, "b"]


@given(lengths=st.lists(st.integers(0, 30), max_size=12), chunk=st.integers(1, 40))
def test_lines_do_not_depend_on_chunks(lengths: list[int], chunk: int) -> None:
    data = b"\n".join(b"%d" % at * length for at, length in enumerate(lengths))
    chunks = [data[at : at + chunk] for at in range(0, len(data), chunk)]
    expected = [(n, line) for n, line in enumerate(data.split(b"\n"), 1) if line]
    assert list(jsonl.split_lines(chunks)) == expected


@settings(max_examples=30)
@given(cuts=st.sets(st.integers(0, 3000)))
def test_ranges_are_read_exactly(tmp_path: Path, cuts: set[int]) -> None:
    if not (tmp_path / "in").exists():
        for name, values in (("a", range(1500)), ("b", range(1500, 3000))):
            write(tmp_path / "in" / f"{name}.jsonl", *({"x": x} for x in values))
    ends = sorted(cuts)
    ranges = [range(a, b) for a, b in zip(ends[::2], ends[1::2], strict=False)]
    wanted = [x for part in ranges for x in part]
    assert [row["x"] for row in scanned(tmp_path / "in", *ranges)] == wanted if wanted else True


# Files


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".zst", lambda data: pa.compress(data, "zstd", asbytes=True)),
    ],
)
def test_compressed_files_are_read_and_truncated_ones_refused(
    tmp_path: Path, suffix: str, pack: Any
) -> None:
    plain = write(tmp_path / "x.jsonl", *({"x": x} for x in range(500))).read_bytes()
    packed = tmp_path / "in" / f"x.jsonl{suffix}"
    packed.parent.mkdir()
    packed.write_bytes(pack(plain))
    assert [row["x"] for row in scanned(tmp_path / "in")] == list(range(500))
    same = (open_source(str(path)).files[0] for path in (packed, tmp_path / "x.jsonl"))
    assert len({file.content_sha256 for file in same}) == 1
    packed.write_bytes(pack(plain)[:-20])
    with pytest.raises(DataError, match=rf"x\.jsonl{suffix} cannot be read: .*"):
        open_source(str(packed))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n1,2\n", r"is not valid JSON Lines: .*x\.jsonl, line 1 is not JSON"),
        (b"[\n1,\n2\n]\n", "is not valid JSON Lines"),
        (b"PAR1" + bytes(100) + b"PAR1", "is not valid JSON Lines"),
        (b"\x1f\x8b\x08garbage", "cannot be read"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_source(str(tmp_path / "x.jsonl"))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (r'"\ud800"', "it has half of a surrogate pair at byte 14"),
        (r'"\udc00 "', "it has half of a surrogate pair at byte 13"),
        (r'"\ud800\u0041"', "it has half of a surrogate pair at byte 19"),
        ("[" * 201 + "]" * 201, "its values are nested in more than 201 levels at byte 207"),
    ],
)
def test_valid_json_that_cannot_be_read_is_explained(
    tmp_path: Path, value: str, problem: str
) -> None:
    deepest = "[" * 200 + "]" * 200
    (tmp_path / "x.jsonl").write_text(f'{{"x": {deepest}}}\n{{"x": {value}}}\n')
    source = open_source(str(tmp_path / "x.jsonl"))
    [(_, [good, bad])] = source.rows(["x"], [range(2)])
    assert not isinstance(good, RowError)
    assert isinstance(bad, RowError)
    assert bad.code == "invalid_json"
    assert bad.message == f"{tmp_path / 'x.jsonl'}, line 2 cannot be read: {problem}"


def test_names_decide_the_format_and_must_not_disagree(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"x": 1})
    pq.write_table(pa.table({"x": [2]}), tmp_path / "b.parquet")
    with pytest.raises(UsageError, match=r"two formats: .*a\.jsonl and .*b\.parquet"):
        open_source(str(tmp_path))
    for name, value in (("jsonl", 1), ("parquet", 2)):
        source = open_source(str(tmp_path), format_name=name)
        assert next(source.scan(["x"], [range(1)]))[1].to_pylist() == [{"x": value}]


# Jobs


LINES = [
    {"prompt": "first", "k": 1},
    '{"prompt": "half a li',
    {"prompt": [{"role": "user", "content": "third"}], "k": "x"},
    {"k": 4},
    {"prompt": "fifth", "sampling_params": {"max_tokens": 2}},
    {"prompt": "sixth", "sampling_params": '{"max_tokens": 3}'},
    {"prompt": "seventh", "sampling_params": {"max_tokenz": 3}},
]


def answers(tmp_path: Path) -> list[dict[str, Any]]:
    return pq.read_table(sorted((tmp_path / "out" / "data").iterdir())).to_pylist()


def test_a_job_over_lines(tmp_path: Path) -> None:
    write(tmp_path / "in" / "x.jsonl", *LINES)
    spec = job(tmp_path, output={"rows_per_part": 3}, errors={"max_error_rate": 0.9})
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    found = answers(tmp_path)
    assert [row["row_id"] for row in found] == list(range(7))
    texts = [row["generated_text"] for row in found]
    assert texts == ["first", None, None, None, "fi", "six", None]
    failed = [row["error"] and row["error"]["code"] for row in found]
    assert failed == [
        *(None, "invalid_json", "template_error", "empty_prompt", None, None),
        "bad_sampling_params",
    ]
    assert [row["k"] for row in found] == ["1", None, '"x"', "4", None, None, None]
    assert found[5]["sampling_params"] == json.dumps('{"max_tokens": 3}')
