"""JSON files are read like JSON Lines of the same objects, a piece at a time."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batchinfer.errors import DataError, ExitCode, RowError, UsageError
from batchinfer.job.init.job_file import InitOptions, write_job_file
from batchinfer.job.input.dataset import open_source
from batchinfer.job.input.formats import json_values, text_file
from batchinfer.job.input.formats.json_values import JsonText
from batchinfer.job.input.formats.options import DEFAULT_OPTIONS, TextOptions
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from tests.job.fakes import FakeBuild, job
from tests.job.input.test_csv import kept
from tests.job.input.test_jsonl import VALUES, write
from tests.job.output.test_resume import stop_at

ALPACA: list[dict[str, Any]] = [
    {"instruction": "Translate.", "input": "", "output": "Übersetze\n😀"},
    {"instruction": "Add", "input": "1 + 2", "output": '"3"'},
]
TALKS: list[dict[str, Any]] = [
    {"id": "a", "conversations": [{"from": "human", "value": "Hi [1, {2}]"}]},
    {"id": "b", "conversations": [], "score": 1.5},
]
FIELD = TextOptions(json_field="examples")


def read(folder: Path, text: str | bytes, options: TextOptions = DEFAULT_OPTIONS) -> list[Any]:
    path = folder / "x.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return kept(open_source(str(path), options=options))


@pytest.mark.parametrize("objects", [ALPACA, TALKS])
@pytest.mark.parametrize("indent", [None, 2])
def test_arrays_lists_and_lines_give_the_same_rows(
    tmp_path: Path, objects: list[Any], indent: int | None
) -> None:
    expected = kept(open_source(str(write(tmp_path / "x.jsonl", *objects))))
    text = json.dumps(objects, indent=indent)
    assert read(tmp_path, text) == expected
    assert read(tmp_path, "\ufeff \n" + text + "\n") == expected
    assert read(tmp_path, "\n".join(map(json.dumps, objects))) == expected
    whole = {"info": {"a": [1, {"b": [[]]}]}, "examples": objects, "more": [{"c": 1}, None]}
    assert read(tmp_path, json.dumps(whole, indent=indent), FIELD) == expected
    assert read(tmp_path, text.encode("utf-16"), TextOptions("utf-16")) == expected
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.json.gz").write_bytes(gzip.compress(text.encode()))
    assert kept(open_source(str(tmp_path / "in"))) == expected


@given(
    objects=st.lists(st.dictionaries(st.sampled_from(["a", "é"]), VALUES), min_size=1, max_size=4),
    chunk=st.integers(1, 9),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_random_objects_are_read_as_json_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    objects: list[Any],
    chunk: int,
    indent: int | None,
    ascii_only: bool,
) -> None:
    assume(any(objects))
    monkeypatch.setattr(text_file, "_CHUNK", chunk)
    lines = open_source(str(write(tmp_path / "x.jsonl", *objects)))
    (tmp_path / "x.json").write_text(json.dumps(objects, indent=indent, ensure_ascii=ascii_only))
    array = open_source(str(tmp_path / "x.json"))
    assert array.schema.equals(lines.schema, check_metadata=True)
    assert kept(array) == kept(lines)
    for first in range(len(objects)):
        columns, rows = lines.schema.names, [range(first, first + 1)]
        assert next(array.rows(columns, rows)) == next(lines.rows(columns, rows))


def test_a_wrong_item_is_an_error_row_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    deep = "[" * 400 + "]" * 400
    path.write_text(f'[{{"x": 0}},\n1, "a" ,\nnull, {deep},\n{{"x": "\\ud800"}},\n{{"x": 3}}]')
    source = open_source(str(path))
    [(_, rows)] = source.rows(["x"], [range(7)])
    messages = [row.message for row in rows if isinstance(row, RowError)]
    places = [" ".join(m.removeprefix(f"{path}, ").split()[:2]) for m in messages]
    assert places == ["line 2", "line 2", "line 3", "line 3", "line 4"]
    assert messages[0] == f"{path}, line 2 is a number; it must be a JSON object"
    assert kept(source) == [{"x": x} for x in [0, *[None] * 5, 3]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"a": 1},\n {"a": 2', "line 2, character 9 is not JSON: Expecting ',' delimiter"),
        ('[{"a": 1}\n {"a": 2}]', 'line 2, character 2 is not JSON: "," or "]" is missing'),
        ('[{"a": 1},\n]', "line 2, character 1 is not JSON: Expecting value"),
        ('[\n{"a": "x\ny"}]', "line 2, character 9 is not JSON: Invalid control character at"),
        ('[{"a": 1}] x', "line 1, character 12 is not JSON: text follows the end of the value"),
        ('[{"a": "' + "x" * 50_000, "line 1, character 8 is not JSON: Unterminated string"),
        ("[" * 100_000, "line 1, character 2 cannot be read: .* in more than 201 levels"),
        (f'[{{"a": {"[" * 201 + "]" * 201}}}]', ".* cannot be read: .* in more than 201 levels"),
        ("[1, 2]", "is not valid JSON: .*line 1 is a number; it must be a JSON object"),
        (
            "3\n",
            r"is not valid JSON: [^\n]*\na \.json file must hold an array of objects, or JSON L",
        ),
        ("prompt,a\nx,y\n", "is not valid JSON: .*line 1 is not JSON"),
        ('{"a": {\n"b": 1}}', "is one object, without a list of objects"),
        ('{"a": [{"b": 1}]}', 'is one object; its .* are: a\nset input.json_field: "a"'),
        (
            '{"a": [{}], "b": [{}, {}], "c": [1]}',
            'is one object; its .* are: a, b\nset input.json_field: "b"',
        ),
        ('[{"a": "Rub\xe9n"}]'.encode("latin-1"), 'line 1, column "a" is not valid UTF-8'),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | bytes, problem: str) -> None:
    with pytest.raises(DataError, match=rf"x\.json,? {problem}"):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"a": 1}]', r"x\.json is an array, not an object\nleave out input\.json_field"),
        ('{"example": [{"a": 1}]}', 'no list "examples"; did you mean example'),
        ('{"examples": {"a": 1}}', r'no list "examples"\nits lists of objects are: \(none\)'),
        ('{"examples": [{"a": 1}]}\n{}', "line 2, character 1 is not JSON: text follows"),
        ('{"examples": [{"a": 1}], 1: 2}', "line 1, character 26 is not JSON: a key is missing"),
        ('{"examples": [{"a": 1}', 'line 1, character 23 is not JSON: "," or "]" is missing'),
    ],
)
def test_a_field_must_hold_a_list(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read(tmp_path, text, FIELD)


def test_the_first_line_of_json_lines_may_be_wrong(tmp_path: Path) -> None:
    assert read(tmp_path, '{"a": "half\n{"a": 1}\n') == [{"a": None}, {"a": 1}]


@pytest.mark.parametrize("text", ['{"a": 1}', '{"a": 1}\n', '{"a": 1}\n\n'])
def test_a_single_line_is_a_row(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == [{"a": 1}]


def test_bytes_that_are_not_utf_8_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'[{"a": "\xe9", "b": "\xe9"},\n{"a": "e"}]')
    found = open_source(str(tmp_path), options=TextOptions(encoding_errors="replace"))
    assert kept(found) == [{"a": "\ufffd", "b": "\ufffd"}, {"a": "e", "b": None}]
    assert found.files[0].replaced_cells == 2


def test_json_next_to_other_files_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "info.json").write_text('{"rows": 1}')
    (tmp_path / "x.csv").write_text("a\n1\n")
    assert kept(open_source(str(tmp_path))) == [{"a": 1}]
    with pytest.raises(UsageError, match=r"input\.json_field is only for the formats json"):
        open_source(str(tmp_path), options=FIELD)


def test_only_the_current_part_of_a_file_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    item = json.dumps({"text": "x" * 90}).encode()
    held = []

    def chunks() -> Iterator[bytes]:
        for start in (b'{"skipped": [', b'{"a": 1}], "rows": ['):
            yield start
            for _ in range(2000):
                yield item + b","
                held.append(len(text._text))
        yield item + b"]}"

    text: Any = None
    monkeypatch.setattr(json_values, "MAX_VALUE_BYTES", 1000)
    text = JsonText(chunks(), "x.json")
    keys = text.object_keys()
    assert next(keys) == "skipped"
    assert text.skip() == 2001
    assert next(keys) == "rows"
    assert sum(1 for _ in text.array_items()) == 2001
    assert max(held) < 1000
    with pytest.raises(DataError, match=r"x\.json, line 1, character 2 is not JSON: a value has"):
        list(JsonText([b'["', *[b"x" * 600] * 9], "x.json").array_items())


def test_values_may_be_cut_anywhere_between_chunks() -> None:
    values = ["0.125", "-1.5e-7", "2E+3", "7", "true", '"a.e"', "[1.5]", '{"a": 2e1}']
    text = f"[{', '.join(values)}]".encode()
    for cut in range(len(text)):
        items = JsonText([text[:cut], text[cut:]], "x.json").array_items()
        assert [value for _, value in items] == values


@pytest.mark.parametrize("name", ["x.json", "x.json.gz"])
def test_init_finds_the_list_of_an_object(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 2}]
    text = json.dumps({"info": [{"a": 1}], "examples": rows, "n": [1, 2, 3]}).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    write_job_file(InitOptions(str(tmp_path / name), job=tmp_path / "job.yaml"))
    spec = load_job(tmp_path / "job.yaml")
    assert (spec.input.json_field, spec.input.id_column) == ("examples", "id")


def test_a_job_over_an_array_resumes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    rows = [{"prompt": f"row {at}", "k": None if at % 2 else at} for at in range(40)]
    (tmp_path / "in" / "x.json").write_text(json.dumps({"examples": rows}))
    spec = job(tmp_path, input={"json_field": "examples"})
    build = FakeBuild(max_num_seqs=4)
    build.before_step = stop_at(12)
    assert run_job(spec, build=build, quiet=True) is ExitCode.INTERRUPTED
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    found = pq.read_table(tmp_path / "out" / "data").to_pylist()
    assert [(row["prompt"], row["k"], row["generated_text"]) for row in found] == [
        (row["prompt"], row["k"], row["prompt"]) for row in rows
    ]
