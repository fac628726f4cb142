"""Suggestions of similar names, and explanations for names that look the same."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.config import PromptConfig
from batchinfer.console.format import near_path
from batchinfer.errors import DataError
from batchinfer.near_names import meant, nearest, unseen_difference
from batchinfer.text.prompt_sources import make_source

COMPOSED, DECOMPOSED = "pr\u00f6mpt", "pro\u0308mpt"


@pytest.mark.parametrize(
    ("asked", "known", "difference"),
    [
        (COMPOSED, DECOMPOSED, "NFD, not NFC; U+006F U+0308, not U+00F6"),
        (DECOMPOSED, COMPOSED, "NFC, not NFD; U+00F6, not U+006F U+0308"),
        ("e\u0301\u00f6", "\u00e9\u00f6", "U+00E9, not U+0065 U+0301"),
        ("pro\u200bmpt", "prompt", "without U+200B ZERO WIDTH SPACE"),
        ("prompt", "\ufeffprompt", "with U+FEFF ZERO WIDTH NO-BREAK SPACE"),
        ("a text", "a\u00a0text", "U+00A0, not U+0020"),
        ("prompt", "prompt ", "with U+0020 SPACE"),
        ("\u2665", "\u2665\ufe0f", "with U+FE0F VARIATION SELECTOR-16"),
        ("e\u0301\u200b", "\u00e9", "NFC, not NFD; U+00E9, not U+0065 U+0301 U+200B"),
    ],
    ids=ascii,
)
def test_names_that_look_the_same_are_explained(asked: str, known: str, difference: str) -> None:
    """This works for short names, too, and even if another name has a closer spelling."""
    assert meant(asked, [f"{asked}s", known]) == (
        f"did you mean {known} (it looks the same: {difference})?"
    )


@pytest.mark.parametrize(("asked", "known"), [("promt", "prompt"), ("Prompt", "prompt")])
def test_names_that_look_different_are_not_explained(asked: str, known: str) -> None:
    assert meant(asked, [known, "other"]) == f"did you mean {known}?"
    assert meant(asked, ["quite", "other"]) == ""


@given(name=st.text(), known=st.lists(st.text(), max_size=5))
def test_any_text_may_be_a_name(name: str, known: list[str]) -> None:
    near = nearest(name, known)
    assert near is None or (near in known and near != name)
    form = unicodedata.normalize("NFD", name)
    assert (unseen_difference(name, form) != "") == (name != form)


def test_columns_and_files_that_look_the_same_are_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        make_source(PromptConfig(column=COMPOSED), ["id", DECOMPOSED])
    assert str(raised.value).startswith(
        f'prompt.column: the data has no column "{COMPOSED}"; did you mean {DECOMPOSED} (it looks '
        "the same: NFD, not NFC; U+006F U+0308, not U+00F6)? its columns are: "
    )
    (tmp_path / DECOMPOSED).touch()
    if not (tmp_path / COMPOSED).exists():  # it exists if the file system normalizes names
        assert "(it looks the same: NFD, not NFC" in near_path(tmp_path / COMPOSED)
