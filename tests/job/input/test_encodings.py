"""Text files in any encoding are read without a changed character, or are refused."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import DataError, ExitCode, UsageError
from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.shared_claim import Role
from batchinfer.job.input.dataset import Source, open_source
from batchinfer.job.input.formats import text_file
from batchinfer.job.input.formats.options import TextOptions
from batchinfer.job.input.invalid_utf8 import with_valid_text
from batchinfer.job.input.valid_text import with_checked_text
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.run.run_job import run_job
from batchinfer.report.captions import figures
from batchinfer.report.from_output import from_output
from tests.job.fakes import FakeBuild, job
from tests.job.input.test_csv import kept, seen, source

REPLACE = TextOptions(encoding_errors="replace")


def table(*texts: str) -> str:
    """Return CSV with line breaks, commas and quotes in cells."""
    file = io.StringIO(newline="")
    rows = (("prompt", "name"), *((f'"{text}",\n{text}', text) for text in texts))
    csv.writer(file).writerows(rows)
    return file.getvalue()


@pytest.mark.parametrize(
    ("encoding", "texts"),
    [
        ("utf-8", ["Rubén", "日本語"]),
        ("utf-8-sig", ["Rubén", "日本語"]),
        ("cp1252", ["Rubén", "“5 €”, naïve"]),
        ("iso8859-1", ["Rubén", "next\x85line"]),
        ("mac_roman", ["Rubén", "“fine”, naïve"]),
        ("cp437", ["Rubén", "½"]),
        ("cp1251", ["Привет", "Москва"]),
        ("cp932", ["日本語", "表示ソ"]),
        ("gb18030", ["北京", "€"]),
        ("euc_kr", ["안녕", "서울"]),
        ("utf-16", ["Rubén", "日本語 😀"]),
        ("utf-16-be", ["Rubén", "ਊ਍"]),
        ("utf-32-le", ["Rubén", "日本語 😀"]),
    ],
)
@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_columns_equal_pythons_csv_on_the_decoded_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, texts: list[str], chunk: int
) -> None:
    monkeypatch.setattr(text_file, "_CHUNK", chunk)
    content = table(*texts)
    found = source(tmp_path, content.encode(encoding), options=TextOptions(encoding))
    assert kept(found) == list(csv.DictReader(io.StringIO(content, newline="")))


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", "Rubén"),
        ("mac_roman", "Rubén"),
        ("cp1252", "don\u2019t"),
        ("mac_roman", "don\u2019t"),
        ("cp1251", "Привет"),
        ("cp932", "日本語"),
    ],
)
def test_the_error_names_line_column_and_an_encoding(
    tmp_path: Path, encoding: str, text: str
) -> None:
    content = "id,prompt,name\n" + '1,"a\nb","c\nd"\n' * 50 + f'2,plain,"x\n{text}"\n'
    place = r'0\.csv, line 153, column "name" is not valid UTF-8 \(byte 0x..\)'
    with pytest.raises(
        DataError,
        match=rf'{place}\nin {encoding}, .* "{text}"; .* set input\.encoding: {encoding} ',
    ):
        source(tmp_path, content.encode(encoding))


def lines(*objects: Any, encoding: str) -> bytes:
    return b"".join(json.dumps(o, ensure_ascii=False).encode(encoding) + b"\n" for o in objects)


def test_the_error_names_the_key_of_a_json_line(tmp_path: Path) -> None:
    content = lines({"a": 1}, {"a": 2, "name": ["Zoë", "Rubén"]}, encoding="cp1252")
    place = r'0\.jsonl, line 2, column "name" is not valid UTF-8 \(byte 0xeb\)'
    with pytest.raises(
        DataError, match=rf'{place}\nin cp1252, .* "Zoë"; .* set input\.encoding: cp1252 '
    ):
        source(tmp_path, content, suffix=".jsonl")
    found = source(tmp_path, content, suffix=".jsonl", options=TextOptions("cp1252"))
    assert kept(found)[1] == {"a": 2, "name": ["Zoë", "Rubén"]}


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("x.csv", b"caf\xe9,b\n1,2\n", r'x\.csv, line 1, column "caf\ufffd" is not'),
        ("x.csv", b"a,b\n1,2,\xe9\n", r"x\.csv, line 2 is not"),
        ("x.csv", b'a,b\n1,2\n"\xe9"x,2\n', r"x\.csv is not"),
        ("x.jsonl", b'{"a": 1}\n{"a": "\xe9', r"x\.jsonl, line 2 is not"),
        ("x.jsonl", b'{"a": 1}\n{"caf\xe9": 1}', r'x\.jsonl, line 2, column "caf\ufffd" is not'),
    ],
)
def test_bad_bytes_outside_of_cells_are_refused_too(
    tmp_path: Path, name: str, content: bytes, place: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=place):
        open_source(str(tmp_path))


@pytest.mark.parametrize("start", ["a,b\n1,2\n", '{"a": 1}\n'])
@pytest.mark.parametrize(
    ("encoding", "shown"),
    [(name, name.removesuffix("-sig")) for name in ("utf-16", "utf-32")]
    + [
        (f"utf-{bits}-{order}", f"utf-{bits}-{order}")
        for bits in (16, 32)
        for order in ("le", "be")
    ],
)
def test_utf_16_and_32_are_recognized(
    tmp_path: Path, encoding: str, shown: str, start: str
) -> None:
    suffix = ".csv" if start.startswith("a") else ".jsonl"
    with pytest.raises(DataError, match=rf"like a file in .*\nset input\.encoding: {shown}$"):
        source(tmp_path, start.encode(encoding), suffix=suffix)
    assert source(
        tmp_path, start.encode(encoding), suffix=suffix, options=TextOptions(shown)
    ).num_rows


def test_a_byte_order_mark_contradicts_another_encoding(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"begins like a file in UTF-8, not in CP1252"):
        source(tmp_path, b"\xef\xbb\xbfa\n\xc3\xa9\n", options=TextOptions("cp1252"))


def test_bytes_that_the_named_encoding_does_not_have_are_refused(tmp_path: Path) -> None:
    content = b"a,b\n1,\x81\n"
    with pytest.raises(DataError, match=r'line 2, column "b" is not valid CP1252 \(byte 0x81\)'):
        source(tmp_path, content, options=TextOptions("cp1252"))
    found = source(tmp_path, content, options=TextOptions("cp1252", "replace"))
    assert (kept(found), found.files[0].replaced_cells) == ([{"a": 1, "b": "\ufffd"}], 1)


def found_in(found: Source, column: str) -> list[Any]:
    return [row[column] for row in kept(found)]


def test_replaced_cells_are_counted(tmp_path: Path) -> None:
    content = b'a,b\nRub\xe9n,\xe9\xe9\n"\xe9",\xef\xbf\xbd\nplain,x\n1,2,\xe9\n'
    found = source(tmp_path, content, options=REPLACE)
    assert found_in(found, "a") == ["Rub\ufffdn", "\ufffd", "plain", None]
    assert [row["b"].decode() for row in seen(found)[:2]] == ["\ufffd\ufffd", "\ufffd"]  # type: ignore[index]
    assert found.files[0].replaced_cells == 3, "U+FFFD in the file itself is not counted"
    content = b'{"a": "Rub\xe9n", "b": "\xe9"}\n{"a": {"caf\xe9": "\xe9"}}\n{"b": "\xe9\n'
    (tmp_path / "x.jsonl").write_bytes(content)
    found = open_source(str(tmp_path / "x.jsonl"), options=REPLACE)
    assert found_in(found, "a") == [
        '"Rub\ufffdn"',
        '{"caf\ufffd":"\ufffd"}',
        None,
    ]
    assert found.files[0].replaced_cells == 3


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_other_formats_have_no_encoding(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(
        UsageError, match=r"input\.encoding is only for the formats jsonl, json, csv"
    ):
        open_source(str(tmp_path / name), options=TextOptions("cp1252"))


def arrow_file(folder: Path, suffix: str, **columns: Any) -> str:
    """Write a file of 3,000 rows, which are read in three batches."""
    table = pa.table({"prompt": pa.array([f"say {row}" for row in range(3000)]), **columns})
    folder.mkdir(exist_ok=True)
    path = str(folder / f"b.{suffix}")
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [
        *(("parquet", kind) for kind in ("string", "struct")),
        *(("arrow", kind) for kind in ("string", "list", "dictionary", "json")),
        *(
            ("arrow", kind)
            for kind in ("list_view", "large_list_view", "list_of_json", "view_of_json")
        ),
        ("arrow", "list_of_dictionary"),
    ],
)
def test_bad_text_of_other_files_is_found(tmp_path: Path, suffix: str, kind: str) -> None:
    data = [*[b"x"] * 2000, b"Rub\xe9n", b"fine", None, *[b"y"] * 996, b"\xff \xe9"]
    text = pa.array(data).view(pa.string())
    nan = pa.array([float("nan")] * 3000)
    json_text = pa.ExtensionArray.from_storage(pa.json_(), text)
    starts, ones = pa.array(range(3000), pa.int32()), pa.array([1] * 3000, pa.int32())
    columns = {
        "string": text,
        "list": pa.ListArray.from_arrays(pa.array(range(3001), pa.int32()), text),
        "struct": pa.StructArray.from_arrays([text, nan], ["a", "b"]),
        "dictionary": pa.DictionaryArray.from_arrays(pa.array(range(3000), pa.int32()), text),
        "json": json_text,
        "list_view": pa.ListViewArray.from_arrays(starts, ones, text),
        "large_list_view": pa.LargeListViewArray.from_arrays(
            starts.cast(pa.int64()), ones.cast(pa.int64()), text
        ),
        "list_of_json": pa.ListArray.from_arrays(pa.array(range(3001), pa.int32()), json_text),
        "view_of_json": pa.ListViewArray.from_arrays(starts, ones, json_text),
        "list_of_dictionary": pa.ListArray.from_arrays(
            pa.array(range(3001), pa.int32()), pa.DictionaryArray.from_arrays(starts, text)
        ),
    }
    paths = [arrow_file(tmp_path / name, suffix, name=columns[kind]) for name in "ab"]
    match = rf'a/b\.{suffix}, row 2000 \(from 0\), column "name" is not valid UTF-8'
    with pytest.raises(DataError, match=match):
        with_checked_text(open_source(paths), ["prompt", "name"])
    found = with_checked_text(open_source(paths, 5500, options=REPLACE), ["prompt", "name"])
    assert [file.replaced_cells for file in found.files] == [2, 1]
    valid = with_valid_text(columns[kind])
    assert "Rub\ufffdn" in str(valid.to_pylist()[2000])
    assert valid.type == columns[kind].type
    source = open_source(paths[0], options=REPLACE)
    _, [row] = next(source.rows(["name"], [range(2000, 2001)]))
    assert str("Rub\ufffdn".encode()) in str(row)


@pytest.mark.parametrize("options", [TextOptions(), REPLACE])
def test_bad_text_in_fields_of_one_name_names_the_column(
    tmp_path: Path, options: TextOptions
) -> None:
    text = pa.array([b"\xff"] * 3000).view(pa.string())
    struct = pa.StructArray.from_arrays([text, text], ["a", "a"])
    path = arrow_file(tmp_path, "arrow", name=struct)
    source = open_source(path, options=options)
    with pytest.raises(DataError, match=r'column "name" .* two fields that have the name "a"'):
        with_checked_text(source, ["prompt", "name"])
    with pytest.raises(DataError, match=r'column "name" .* two fields that have the name "a"'):
        next(source.rows(["name"], [range(1)]))


def test_bad_text_of_other_files_ends_or_is_counted_by_a_job(tmp_path: Path) -> None:
    names = pa.array([b"Rub\xe9n"] * 3000).view(pa.string())
    arrow_file(tmp_path / "in", "parquet", name=names)
    build = FakeBuild()
    with pytest.raises(DataError, match=r'row 0 \(from 0\), column "name"'):
        run_job(job(tmp_path), build=build, quiet=True)
    assert build.count == 0
    spec = job(tmp_path, input={"encoding_errors": "replace", "limit": 3})
    for _ in range(2):
        assert run_job(spec, build=build, quiet=True, overwrite=True) is ExitCode.OK
        summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
        assert summary["input"] == {"replaced_cells": 3}
    assert pq.read_table(tmp_path / "out" / "data")["name"].to_pylist() == ["Rub\ufffdn"] * 3
    prompts = job(tmp_path, input={"limit": 3}, prompt={"column": "name"})
    before = build.count
    run_job(prompts, build=build, quiet=True, overwrite=True)
    assert build.count == before + 1, "a bad prompt fails only its row"


def test_later_runs_of_a_job_keep_the_count_of_replaced_cells(tmp_path: Path) -> None:
    names = pa.array([b"Rub\xe9n"] * 3000).view(pa.string())
    arrow_file(tmp_path / "in", "parquet", name=names)
    spec = job(tmp_path, input={"encoding_errors": "replace", "limit": 20})
    for index in range(2):
        role = Role(Shard(index, 2))
        assert run_job(spec, build=FakeBuild(), quiet=True, role=role) is ExitCode.OK
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert summary["input"] == {"replaced_cells": 20}


def test_only_kept_text_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = pa.array([b"\xff"] * 3000).view(pa.string())
    arrow_file(
        tmp_path / "in",
        "parquet",
        bad=bad,
        number=pa.array(range(3000)),
        name=pa.nulls(3000, pa.string()),
    )
    scanned: list[list[str]] = []
    scan = Source.scan
    monkeypatch.setattr(
        Source,
        "scan",
        lambda self, names, rows: scanned.append([*names]) or scan(self, names, rows),
    )
    spec = job(tmp_path, input={"keep_columns": ["prompt", "name", "number"], "limit": 5})
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    assert scanned[0] == ["name"]
    before = len(scanned)
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    assert ["name"] not in scanned[before:], "an unchanged job is not checked again"


def test_a_bad_prompt_is_read_with_replaced_bytes(tmp_path: Path) -> None:
    prompt = pa.array([b"Rub\xe9n"] * 3000).view(pa.string())
    arrow_file(tmp_path, "parquet", name=prompt)
    path = str(tmp_path / "b.parquet")
    for options, text in ((TextOptions(), b"Rub\xe9n"), (REPLACE, "Rub\ufffdn".encode())):
        _, rows = next(open_source(path, options=options).rows(["name"], [range(1)]))
        assert rows == [{"name": text}]


def test_a_job_is_refused_before_its_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    rows = [f"prompt {row},n{row}\n".encode() for row in range(30)]
    (tmp_path / "in" / "x.csv").write_bytes(b"prompt,name\n" + b"".join(rows) + b"last,Rub\xe9n\n")
    build = FakeBuild()
    with pytest.raises(DataError, match=r'line 32, column "name"'):
        run_job(job(tmp_path), build=build, quiet=True)
    assert build.count == 0
    assert not (tmp_path / "out" / "data").exists()

    def answers(**keys: str) -> list[dict[str, Any]]:
        spec = job(tmp_path, input=keys)
        assert run_job(spec, build=build, quiet=True, overwrite=True) is ExitCode.OK
        return pq.read_table(tmp_path / "out" / "data").to_pylist()

    assert answers(encoding="windows-1252")[-1]["name"] == "Rubén"
    assert answers(encoding_errors="replace")[-1]["name"] == "Rub\ufffdn"
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert summary["input"] == {"replaced_cells": 1}
    data = from_output(OutputDir(tmp_path / "out"), time.time())
    assert ("Damaged texts", "1") in [(one.label, one.value) for one in figures(data, None)]
