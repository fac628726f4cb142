"""Kinds of CSV files that programs write: columns equal Python's csv, or the file is refused."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from batchinfer.errors import DataError, UsageError
from batchinfer.job.init.job_file import InitOptions, write_job_file
from batchinfer.job.input.dataset import open_source
from batchinfer.job.input.formats.options import TextOptions
from batchinfer.job.job import open_input
from batchinfer.job.spec.load import load_job
from batchinfer.job.spec.spec import InputSpec
from tests.job.fakes import job
from tests.job.input.test_csv import kept, source

WIDE = 1079
MARK = "\ufeff"
KINDS = {
    "spreadsheet in Europe": (
        ";",
        "cp1252",
        "id;prompt;price\r\n1;Größe 38;2,50\r\n2;Café;3,10\r\n",
    ),
    "spreadsheet as Unicode": ("\t", "utf-16", "id\tprompt\r\n1\tGröße\r\n2\tab\r\n"),
    "UTF-8 with a mark": (",", "utf-8", f'{MARK}id,prompt\r\n1,"é"\r\n2,b\r\n'),
    "mark before a quote": (",", "utf-8", f'{MARK}"id","prompt"\n1,é\n2,b\n'),
    "pipes": ("|", "utf-8", "id|prompt\n1|a, b; c\n2|d\n"),
    "semicolons with commas": (";", "utf-8", 'id;prompt, long\n1;"a; b, c"\n2;d\n'),
    "tabs in quotes": ("\t", "utf-8", 'id\tprompt\n1\t"a\tb"\n2\tc\n'),
    "quoted newlines": (",", "mac_roman", 'id,prompt\n1,"é\n\n""b"",\r\nc"\n2,"\n"\n'),
    "old Mac": (";", "mac_roman", "id;prompt\r1;é\r2;b\r"),
    "ragged quotes": (",", "cp1252", 'id,"prompt"\n"1",é\n2,"b"\n'),
    "colons": (":", "utf-8", "id:prompt\n1:a\n2:b\n"),
    "wide": (
        *(",", "cp1252"),
        "".join(",".join(f"{cell}{at}" for at in range(WIDE)) + "\n" for cell in ("c", "é", "x")),
    ),
}
"""Delimiter, encoding and text of each kind."""


def expected(text: str, delimiter: str) -> list[dict[str, str]]:
    file = io.StringIO(text.removeprefix(MARK), newline="")
    return [dict(row) for row in csv.DictReader(file, delimiter=delimiter)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_column_equals_pythons_csv(tmp_path: Path, kind: str) -> None:
    delimiter, encoding, text = KINDS[kind]
    options = TextOptions(encoding, delimiter=delimiter)
    found = source(tmp_path, text.encode(encoding), options=options)
    rows = [{name: str(value) for name, value in row.items()} for row in kept(found)]
    assert rows == expected(text, delimiter)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"colons", "wide"}))
def test_init_finds_the_delimiter(tmp_path: Path, kind: str) -> None:
    delimiter, encoding, text = KINDS[kind]
    data, file = tmp_path / "x.csv", tmp_path / "job.yaml"
    data.write_bytes(text.encode(encoding))
    write_job_file(InitOptions(str(data), job=file, encoding=encoding))
    spec = load_job(file)
    assert (spec.input.delimiter or ",", spec.input.encoding.replace("-", "_")) == (
        delimiter,
        encoding.replace("-", "_"),
    )
    assert [row["id"] for row in kept(open_input(spec))] == [1, 2]


@pytest.mark.parametrize(
    ("name", "text", "delimiter"),
    [
        ("x.tsv", "id\tprompt\n1\ta, b\n", None),
        ("x.tsv", "id,prompt\n1,a\n", ","),
        ("x.csv", "prompt\na; b\n", None),
        ("x.csv", 'id,prompt\n1,"a\n' + "b;\n" * 400_000 + '"\n', None),
        ("x.csv", 'id;prompt\n1;"a\n' + "b,\n" * 400_000 + '"\n', ";"),
        ("x.csv", "id,prompt|notes\n1,a\n2,b|c\n", None),
        ("x.jsonl", '{"prompt": "a;b"}\n', None),
    ],
)
def test_init_writes_only_an_unusual_delimiter(
    tmp_path: Path, name: str, text: str, delimiter: str | None
) -> None:
    (tmp_path / name).write_text(text)
    file = tmp_path / "job.yaml"
    write_job_file(InitOptions(str(tmp_path / name), job=file))
    assert load_job(file).input.delimiter == delimiter


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,a\n1,2\n", r'more than one column named "a"'),
        (b"a;b\n1;2\n", r'the header has no ",": a;b\nset input\.delimiter: ";"'),
        (b"a\tb\n1\t2\n", r'the header has no ",": .*\nset input\.delimiter: "\\t"'),
    ],
)
def test_unclear_columns_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        source(tmp_path, content)


def test_a_wrong_delimiter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'the header has no ";": a,b\nset input\.delimiter: ","'):
        source(tmp_path, b"a,b\n1,2\n", options=TextOptions(delimiter=";"))


@pytest.mark.parametrize("text", ["", ";;", "§", '"', "\n"])
def test_a_delimiter_is_one_ascii_character(text: str) -> None:
    with pytest.raises(ValueError, match="cannot separate cells"):
        InputSpec(path="x.csv", delimiter=text)


def test_only_csv_has_a_delimiter(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(UsageError, match=r"input\.delimiter is only for the formats csv"):
        open_source(str(tmp_path), options=TextOptions(delimiter=";"))


def test_the_keys_of_a_job_reach_the_reader(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes("a;b\n1;é\n2;\x81\n".encode("latin-1"))
    keys = {"path": str(tmp_path), "delimiter": ";", "encoding": "cp1252"}
    spec = job(tmp_path, input={**keys, "encoding_errors": "replace"})
    assert kept(open_input(spec)) == [{"a": 1, "b": "é"}, {"a": 2, "b": "\ufffd"}]
