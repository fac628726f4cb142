"""The report as HTML: its words, its structure, and untrusted text, which stays text."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from batchinfer.report.captions import memory, sharing_caption, time_slices
from batchinfer.report.histograms import Lengths
from batchinfer.report.page import page
from batchinfer.report.sanitize import cut, sanitize, without_secrets
from batchinfer.report.timeline import Timeline
from tests.report.pages import (
    GOLDEN,
    KINDS,
    golden,
    page_of,
    some_data,
    some_lengths,
    some_steps,
    words_of,
)


@pytest.mark.parametrize("kind", GOLDEN)
def test_page_has_the_expected_words(kind: str) -> None:
    """After an intended change, run ``python -m tests.report.pages`` and read the new pages."""
    assert words_of(page_of(kind)) == golden(kind).read_text(encoding="utf-8")


class Tree(HTMLParser):
    """The text of a page, and its elements in order: tag, attributes, enclosing tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], tuple[str, ...]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "link"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.elements.append((tag, attributes, tuple(self._open)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        """Return the attributes of all elements of a kind."""
        return [attributes for name, attributes, _ in self.elements if name == tag]

    @property
    def vocabulary(self) -> set[tuple[str, str]]:
        """All tags, and all pairs of a tag and an attribute."""
        return {(tag, name) for tag, attributes, _ in self.elements for name in ["", *attributes]}


@pytest.mark.parametrize("kind", KINDS)
def test_page_structure_is_accessible(kind: str) -> None:
    tree = Tree(page_of(kind))
    levels = [int(tag[1]) for tag, *_ in tree.elements if tag in ("h1", "h2", "h3")]
    assert levels[0] == levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    ids = [attributes["id"] for _, attributes, _ in tree.elements if "id" in attributes]
    assert [attributes["href"].removeprefix("#") for attributes in tree.all("a")] == ids
    assert len({*ids}) == len(ids)
    assert {attributes["scope"] for attributes in tree.all("th")} <= {"col", "row"}
    assert len(tree.all("thead")) == len(tree.all("table"))
    for svg in tree.all("svg"):
        assert svg["role"] == "img"
        assert svg["aria-label"]
    in_charts = [tag for tag, _, parents in tree.elements if tag == "title" and "svg" in parents]
    assert len(in_charts) >= 30 * len(tree.all("svg"))
    assert "open" not in tree.all("details")[0]


def test_hostile_texts_stay_text() -> None:
    plain, hostile = Tree(page_of("plain")), Tree(page_of("hostile"))
    assert hostile.vocabulary == plain.vocabulary
    tags = {tag for tag, _ in plain.vocabulary}
    assert tags.isdisjoint({"script", "iframe", "object", "embed", "img", "base", "form"})
    shown = " ".join(hostile.text)
    for text in (
        "<script>document.documentElement.id='pwned'</script>",
        "{{ 7 * 7 }}",
        "&lt;script",
    ):
        assert text in shown
    control = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]"
    assert not re.search(control, page_of("hostile"))


def test_page_does_not_grow_with_the_data() -> None:
    many = replace(
        some_data(tuple(f"{i}" for i in range(30))),
        timeline=some_steps(1e-3, 200_000),
        lengths=some_lengths(200_000),
        examples=(),
    )
    assert len(page(many)) < 1.5 * len(page_of("plain")) < 600_000


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x00b\x1b[31mc\rd\r\ne\tf", "ab[31mcd\ne\tf"),
        ("\u202eabc\u2066", "abc"),
        ("\ud800\ue000\ufffe", "\ufffd\ufffd\ufffd"),
        ("e" + "\u0301" * 50 + "f", "e\u0301\u0301\u0301f"),
        ("a\u2028b", "a\nb"),
        ("\U0001f469\u200d\U0001f467", "\U0001f469\u200d\U0001f467"),
    ],
)
def test_sanitize_removes_characters_that_act(text: str, shown: str) -> None:
    assert sanitize(text) == shown


def test_cut_marks_what_it_removes() -> None:
    assert cut("abc", 3) == "abc"
    assert cut("abcd", 3) == "abc\N{HORIZONTAL ELLIPSIS}"
    assert cut("\x00" * 100 + "abc", 3) == "\N{HORIZONTAL ELLIPSIS}"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:secret@bucket/x.parquet", "s3://bucket/x.parquet"),
        ("https://u@host/a?sig=secret&x=1 b", "https://host/a?\N{HORIZONTAL ELLIPSIS} b"),
        ("mail me@example.com?", "mail me@example.com?"),
    ],
)
def test_urls_lose_their_secrets(url: str, shown: str) -> None:
    assert without_secrets({"path": [url]}) == {"path": [shown]}


def test_memory_sentence_compares_with_contiguous_allocation() -> None:
    data = replace(some_data(), lanes=[])
    assert memory(data) == (
        "Sharing and paging ran 48 rows at once, where contiguous allocation would have fit 12."
    )
    data.timeline.peak = replace(data.timeline.peak, pool_bytes=1e13)
    assert memory(replace(data, unit="sequence")) == (
        "Sharing and paging ran 48 sequences at once in 954 MiB, where contiguous allocation "
        "would have taken 3.73 GiB."
    )
    assert memory(replace(data, timeline=Timeline(0.0))) == ""


@pytest.mark.parametrize(("cached", "is_said"), [(300, True), (500, False)])
def test_caption_mentions_common_prefixes_that_were_not_reused(cached: int, is_said: bool) -> None:
    data = replace(some_data(), lengths=Lengths())
    sums = {"prompt_tokens": 1000, "cached_tokens": cached, "distinct_tokens": 600}
    data.lengths.sums.update(sums)
    assert ("; rows share 40% of their tokens" in sharing_caption(data)) == is_said


def test_phases_are_listed_with_their_enclosing_time() -> None:
    phases = {"importing torch": 30.0, "packing weights": 5.0, "merging statistics": 2.0}
    data = replace(some_data(), phases=phases, load_s=20.0, total_s=600.0)
    notes = {one.label: one.note for one in time_slices(data)}
    assert notes["Loading the model"] == "packing weights 5.0 s"
    assert notes["Before and after"] == "merging statistics 2.0 s"
