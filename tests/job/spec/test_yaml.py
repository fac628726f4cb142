"""Parsing of YAML text into plain data with line numbers, within limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.errors import UsageError
from batchinfer.job.spec.yaml import MAX_BYTES, MAX_CHARACTERS, MAX_DEPTH, parse_yaml, read_yaml


def value_of(text: str) -> object:
    return parse_yaml(f"x: {text}", "job.yaml").data["x"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("-.5", -0.5),
        ("no", "no"),
        ("true", True),
        ("~", None),
        ("", None),
        ("12", 12),
        ("0o17", 15),
        ("0x1F", 31),
        ("07", 7),
        ("1_000", "1_000"),
        ("2026-11-20", "2026-11-20"),
        ("'12'", "12"),
        ('"true"', "true"),
    ],
)
def test_plain_scalars_follow_the_core_schema_of_yaml_1_2(text: str, value: object) -> None:
    found = value_of(text)
    assert found == value
    assert type(found) is type(value)


def test_keys_are_texts_as_written() -> None:
    assert parse_yaml("{50256: 1, true: 2}", "job.yaml").data == {"50256": 1, "true": 2}


def test_every_key_and_item_has_its_line() -> None:
    text = parse_yaml("a:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n", "job.yaml")
    assert text.lines == {
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "c"): 3,
        ("a", "c", 0): 4,
        ("a", "c", 1): 5,
        ("a", "c", 1, "d"): 5,
    }


def test_an_alias_is_a_copy_with_the_lines_of_its_anchor() -> None:
    text = parse_yaml("a: &x {k: [1]}\nb: *x", "job.yaml")
    data = text.data
    assert (text.lines[("b",)], text.lines[("b", "k")]) == (2, 1)
    assert data == {"a": {"k": [1]}, "b": {"k": [1]}}
    assert data["a"]["k"] is not data["b"]["k"]


def test_invalid_yaml_value_error_names_the_key() -> None:
    with pytest.raises(UsageError, match=r"job\.yaml, line 2: errors\.min_rows: 9+ is too large"):
        parse_yaml(f"errors:\n  min_rows: {'9' * 30}", "job.yaml")


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_text_is_null(text: str) -> None:
    assert parse_yaml(text, "job.yaml").data is None


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
LONG_TEXT_BOMB = f"a: &a {'x' * (MAX_CHARACTERS // 8)}\nb: [{', '.join(['*a'] * 10)}]"
DEEP_BY_ALIAS = "".join(
    f"a{i}: {f'&a{i} '}{'[' * 10}{f'*a{i - 1}' if i else 'x'}{']' * 10}\n" for i in range(200)
)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("? !k a\n: 1", 1, "key"),
        ("path: *.parquet", 1, "a string that starts with * needs quotes"),
        ("a: &a [*a]", 1, f"more than {MAX_DEPTH} levels deep"),
        ("a: 1\n---\nb: 2", 2, "found another document; a job file must be a single document"),
        ("%YAML 1.1\n---\na: no", 3, "only YAML 1.2"),
        ("a: 1\nb: .nan", 2, ".nan cannot be used as a number"),
        ("a: 1e999", 1, "too large"),
        (f"a: {'9' * 5000}", 1, "too large"),
        ('a: "\\ud800"', 1, "not valid Unicode"),
        (BOMB, 1, "aliases"),
        (DEEP_BY_ALIAS, 1, f"more than {MAX_DEPTH} levels deep"),
        ("\n" + "[" * 50 + "]" * 50, 2, f"more than {MAX_DEPTH} levels deep"),
    ],
)
def test_yaml_error_names_file_line_and_reason(text: str, line: int, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_yaml(text, "job.yaml")
    message = str(caught.value)
    assert message.startswith(f"job.yaml, line {line}: ")
    assert says in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: {{ body }}", 'needs quotes around it, as in "{{ column }}"'),
        ("a: {b: Say {{ body }}}", "a string with braces needs quotes"),
        ("a: Say {{ body }}: now", "a string with a colon needs quotes"),
        ("a: {% if b %}c{% endif %}", "a string that starts with % needs quotes"),
        ('a: "{{ row["b c"] }}"', "inside quotes, use the other kind"),
        ('a: {b: "{{ row["b c"] }}"}', "inside quotes, use the other kind"),
        ("a: 1\n\tb: 2", "indent with spaces"),
        ("a:\n  b: 1\n c: 2", "the same indent"),
        ('a: "b\nc: 1', "a quote is not closed"),
        ("a: [1\nb: 2", "is not closed"),
    ],
)
def test_common_yaml_mistakes_get_advice(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_yaml(text, "job.yaml")
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 500, "{a: " * 500, "- " * 500, "[" * MAX_BYTES])
def test_deeply_nested_yaml_is_refused(text: str) -> None:
    with pytest.raises(
        UsageError,
        match=rf"^job\.yaml is nested more than {MAX_DEPTH} levels deep$",
    ):
        parse_yaml(text, "job.yaml")


def test_control_characters_are_refused_and_not_printed() -> None:
    with pytest.raises(UsageError) as caught:
        parse_yaml("a: \x1b[31mred\x00", "job.yaml")
    assert "\x1b" not in str(caught.value)
    assert "\x00" not in str(caught.value)


def test_endless_device_is_not_read_as_job_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(UsageError, match=r"job\.yaml cannot be read: it is a pipe"):
            read_yaml(path, "job.yaml")


def test_invalid_character_is_named_with_its_line() -> None:
    with pytest.raises(UsageError, match=r"^job\.yaml, line 2: .*the character U\+0000$"):
        parse_yaml("a: 1\nb: x\0y\n", "job.yaml")


@pytest.mark.parametrize("name", ["missing.yaml", ".", "nul\0.yaml"])
def test_a_file_that_cannot_be_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"job\.yaml cannot be read"):
        read_yaml(tmp_path / name, "job.yaml")


def test_byte_order_mark_is_not_part_of_the_first_key(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: 1")
    assert read_yaml(file, "job.yaml").data == {"a": 1}


yaml_like = st.text(st.sampled_from("ab01 \n\t:-?[]{},&*!|>'\"%@`#~.\\\x00\u2028é"), max_size=60)


@given(yaml_like | st.text(max_size=40))
def test_any_text_is_data_or_a_usage_error_of_one_line(text: str) -> None:
    try:
        parse_yaml(text, "job.yaml")
    except UsageError as error:
        message = str(error)
    else:
        message = "job.yaml: fine"
    assert message.startswith("job.yaml")
    assert len(message.splitlines()) == 1
