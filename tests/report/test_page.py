"""The page itself, as a browser sees it: no scripts, no requests, nothing in another's place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from batchinfer.report.captions import figures, memory, sharing_caption, time_slices
from batchinfer.report.drawing.palette import CHART
from batchinfer.report.histograms import COLUMNS as REQUEST_COLUMNS
from batchinfer.report.histograms import Lengths
from batchinfer.report.lanes import Lane, Piece
from batchinfer.report.page import page
from batchinfer.report.report_data import Example, Failure, Findings, Price, RunFacts
from batchinfer.report.sanitize import cut, sanitize, without_secrets
from batchinfer.report.timeline import COLUMNS as STEP_COLUMNS
from batchinfer.report.timeline import Timeline
from tests.report.browser import CHROMIUM, Browser
from tests.report.hostile import HOSTILE

KV = {"block_size": 16, "num_blocks": 1000, "bytes_per_block": 1 << 20}


def some_steps(scale: float = 1.0, count: int = 500) -> Timeline:
    """A job whose rows share, wait, swap and are computed again."""
    rng = np.random.default_rng(3)
    used = 700 + 200 * np.sin(np.arange(count) / 40) + rng.integers(0, 60, count)
    steps = dict.fromkeys(STEP_COLUMNS, np.full(count, 3.0))
    steps |= {
        "t_s": np.arange(1.0, count + 1) * scale,
        "step_ms": np.full(count, 900.0 * scale),
        "num_running": np.round(used / 20),
        "num_waiting": np.linspace(3000, 0, count),
        "kv_blocks_total": np.full(count, 1000.0),
        "kv_blocks_used": used,
        "kv_blocks_shared": used * 0.4,
        "kv_blocks_cached": 990 - used,
        "kv_logical_blocks": used * 2,
        "contiguous_blocks": used * 4,
        "kv_waste": np.full(count, 0.07),
        "prefill_tokens": rng.integers(0, 8000, count) * (rng.random(count) > 0.5),
        "decode_tokens": used,
    }
    timeline = Timeline(count * scale)
    timeline.add(steps, 0.0, 0.0, 16, 1 << 20)
    return timeline


def some_lengths(rows: int = 4000) -> Lengths:
    rng = np.random.default_rng(4)
    lengths = Lengths()
    lengths.add({name: rng.lognormal(5, 1, rows).astype(int) * 1.0 for name in REQUEST_COLUMNS})
    return lengths


def some_findings(texts: tuple[str, ...] = ("plain",), scale: float = 1.0) -> Findings:
    """Findings that hold every one of ``texts`` in every place for a text."""
    return Findings(
        title=" | ".join(texts),
        state="finished",
        when="2026-11-21 12:00",
        model=" | ".join(texts),
        device=texts[0],
        rows_total=4000,
        rows_done=4000,
        rows_failed=len(texts),
        total_s=600.0 * scale,
        load_s=20.0,
        engine_s=580.0 * scale,
        wall_s=600.0 * scale,
        timeline=some_steps(scale),
        lengths=some_lengths(),
        kv=KV,
        phases=dict.fromkeys(texts, 5.0),
        failures=[Failure(text, 7, [(text, text), ("row 2", text[::-1])]) for text in texts],
        examples=[Example(i, [(t, t)], t, "1 token in", (t, t)) for i, t in enumerate(texts)],
        lanes=[
            Lane(text, [Piece("used", 0.4), Piece("again", 0.6)], 7, 0.9, "died") for text in texts
        ],
        runs=[
            RunFacts(text, text, 10, 1.0, 2.0, 1e9, "not ended") for text in (*texts, "run-00002")
        ],
        job={text: {text: text, "list": [text], text + "x": {text: None}} for text in texts},
        versions={text: text for text in texts},
    )


KINDS = {
    "plain": lambda: some_findings(),
    "hostile": lambda: some_findings(HOSTILE),
    "encoder": lambda: replace(some_findings(), kv={**KV, "num_blocks": 0}, draws=False),
    "of days": lambda: some_findings(scale=1e4),
    "without rows": lambda: replace(
        some_findings(), timeline=Timeline(0.0), lengths=Lengths(), failures=(), examples=()
    ),
}


@cache
def page_of(kind: str) -> str:
    """The page of one of ``KINDS``, drawn once."""
    return page(KINDS[kind](), Price(2.0, "EUR"))


class Tree(HTMLParser):
    """The elements of a page in order: tag, attributes, and the tags that they are in."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], tuple[str, ...]]] = []
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.elements.append((tag, found, tuple(self._open)))
        if tag not in ("meta", "link"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.elements.append((tag, found, tuple(self._open)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str]]:
        """Attributes of all elements of a kind."""
        return [attributes for name, attributes, _ in self.elements if name == tag]


class Tags(HTMLParser):
    """The elements and attributes of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("kind", KINDS)
def test_the_structure_of_a_page(kind: str) -> None:
    tree = Tree(page_of(kind))
    levels = [int(tag[1]) for tag, *_ in tree.elements if tag in ("h1", "h2", "h3")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    ids = [attributes["id"] for _, attributes, _ in tree.elements if "id" in attributes]
    anchors = [attributes["href"].removeprefix("#") for attributes in tree.all("a")]
    assert anchors == ids  # each section is in the contents, in order
    assert len({*ids}) == len(ids)
    headers = tree.all("th")
    assert {attributes["scope"] for attributes in headers} <= {"col", "row"}
    assert len(tree.all("thead")) == len(tree.all("table"))
    for svg in tree.all("svg"):
        assert svg["role"] == "img"
        assert svg["aria-label"]
    in_charts = [tag for tag, _, parents in tree.elements if tag == "title" and "svg" in parents]
    assert len(in_charts) >= 40 * len(tree.all("svg"))
    assert "open" not in tree.all("details")[0]
    assert len(tree.all("dl")) >= 2


def test_errors_come_first_and_answers_before_what_was_asked() -> None:
    html = page_of("plain")
    marks = ["<h1>", 'class="figures"', 'id="errors"', "<svg", 'id="rows"', "<details>"]
    assert [html.index(mark) for mark in marks] == sorted(html.index(mark) for mark in marks)
    (row,) = re.findall(r"<article>(.*?)</article>", html, re.S)
    assert row.index('class="text answer"') < row.index("<dt")
    why = page(replace(some_findings(), state="failed", error="the disk\nis full"))
    assert why.index("the disk\nis full") < why.index('id="errors"')


def test_keys_without_a_value_are_left_out() -> None:
    job = {"model": {"name": "m", "revision": None}, "scale": {"resources": {}}, "input": {"n": 0}}
    html = page(replace(KINDS["without rows"](), job=job))
    text = " ".join(Tags(html).text)
    assert "revision" not in text
    assert "scale" not in text
    assert "2 keys with the values" in text


def test_what_means_nothing_is_left_out() -> None:
    said = " ".join(Tags(page_of("encoder")).text)
    for word in (
        "Inside the pool",
        "three ways",
        "Sharing",
        "Waste",
        "Answer",
        "answers",
        "in the pool",
    ):
        assert word in " ".join(Tags(page_of("plain")).text)
        assert word not in said
    shown = {figure.label: figure.unit for figure in figures(KINDS["encoder"](), None)}
    assert shown == {"Rows done": "", "Time": "", "Speed": "rows/s", "Input": "tokens/s"}


def test_hostile_texts_are_text() -> None:
    assert len(HOSTILE) == 200
    plain, hostile = Tags(page_of("plain")), Tags(page_of("hostile"))
    assert hostile.names == plain.names
    assert hostile.attributes == plain.attributes
    assert plain.names.isdisjoint({"script", "iframe", "object", "embed", "img", "base", "form"})
    shown = " ".join(hostile.text)
    assert "<script>window.pwned = 1</script>" in shown
    assert "{{ 7 * 7 }}" in shown
    assert "&lt;script&gt;window.pwned=1" in shown


def test_control_characters_are_stripped() -> None:
    html = page_of("hostile")
    html.encode()
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]", html
    )


def test_a_page_does_not_grow_with_the_data() -> None:
    small = page_of("plain")
    many = replace(
        some_findings(tuple(f"{i}" for i in range(30))),
        timeline=some_steps(1e-3, 200_000),
        lengths=some_lengths(200_000),
        examples=(),
    )
    assert len(page(many)) < 1.5 * len(small)
    assert len(small) < 400_000


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x00b\x1b[31mc", "ab[31mc"),
        ("a\r\nb\tc\rd", "a\nb\tcd"),
        ("\u202eabc\u2066", "abc"),
        ("\ud800\ue000\ufffe", "\ufffd\ufffd\ufffd"),
        ("e" + "\u0301" * 50 + "f", "e\u0301\u0301\u0301f"),
        ("a\u2028b", "a\nb"),
        ("\U0001f469\u200d\U0001f467", "\U0001f469\u200d\U0001f467"),
    ],
)
def test_clean(text: str, shown: str) -> None:
    assert sanitize(text) == shown


def test_cut() -> None:
    assert cut("abc", 3) == "abc"
    assert cut("abcd", 3) == "abc\N{HORIZONTAL ELLIPSIS}"
    assert cut("\x00" * 100 + "abc", 3) == "\N{HORIZONTAL ELLIPSIS}"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:secret@bucket/x.parquet", "s3://bucket/x.parquet"),
        ("https://u@host/a?sig=secret&x=1 b", "https://host/a?\N{HORIZONTAL ELLIPSIS} b"),
        ("gs://bucket/dt=1/*.parquet", "gs://bucket/dt=1/*.parquet"),
        ("mail me@example.com?", "mail me@example.com?"),
    ],
)
def test_urls_lose_what_is_secret_in_them(url: str, shown: str) -> None:
    assert without_secrets({"path": [url]}) == {"path": [shown]}


def test_what_paging_did_to_memory() -> None:
    found = replace(some_findings(), lanes=[])
    assert memory(found) == (
        "Sharing and paging ran 48 rows at once where contiguous allocation would have fit 12."
    )
    roomy = replace(found, timeline=with_pool(found.timeline, 1e13), unit="sequences")
    assert memory(roomy) == (
        "Sharing and paging ran 48 sequences at once in 954 MiB where contiguous allocation would "
        "have taken 3.73 GiB."
    )
    fleet = replace(found, lanes=[Lane("w01", [], 7, 0.9, "ended")])
    assert memory(fleet).startswith("Sharing and paging ran 48 rows at once on one worker in")
    assert memory(replace(found, timeline=Timeline(0.0))) == ""


def with_pool(timeline: Timeline, pool_bytes: float) -> Timeline:
    timeline.peak = replace(timeline.peak, pool_bytes=pool_bytes)
    return timeline


def test_what_is_of_one_worker_and_what_of_all_is_said() -> None:
    fleet = some_findings()
    alone = replace(fleet, lanes=[])
    shares = [
        next(figure.note for figure in figures(found, None) if figure.label == "Pool in use")
        for found in (alone, fleet)
    ]
    assert shares[1] == f"of each worker's, {shares[0]}"
    assert page(fleet).count("The chart adds up all workers.") == 3
    assert "all workers" not in page(alone)


def test_options_are_not_broken() -> None:
    html = page(replace(some_findings(), state="finished with too many errors", rows_failed=50))
    assert '<span class="code whole">--retry-errors</span>, or raise' in html


@pytest.mark.parametrize(("cached", "is_told"), [(300.0, True), (500.0, False)])
def test_what_rows_have_in_common_is_told_where_it_was_not_all_found(
    cached: float, is_told: bool
) -> None:
    found = replace(some_findings(), lengths=Lengths())
    tokens = {"prompt_tokens": 1000.0, "cached_tokens": cached, "distinct_tokens": 600.0}
    found.lengths.sums.update(tokens)
    assert (", of 40% that rows have in common" in sharing_caption(found)) == is_told


def test_what_it_cost() -> None:
    (cost,) = (one for one in figures(some_findings(), Price(3.0, "EUR")) if one.label == "Cost")
    assert (cost.value, cost.unit) == ("0.50", "EUR")  # ten minutes
    assert cost.note.startswith("at 3.00 EUR an hour; ")
    assert cost.note.endswith(" EUR per million output tokens")
    assert "Cost" not in {one.label for one in figures(some_findings(), None)}


def test_waits_are_told_where_they_belong() -> None:
    phases = {"importing torch": 30.0, "packing weights": 5.0, "merging statistics": 2.0}
    found = replace(some_findings(), phases=phases, load_s=20.0, total_s=600.0)
    notes = {one.label: one.note for one in time_slices(found)}
    assert notes["Loading the model"] == "packing weights 5.0 s"
    assert notes["Before and after"] == "merging statistics 2.0 s"


needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser: install Debian's package chromium"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@needs_chromium
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_browser(browser: Browser, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "report.html"
    file.write_text(page_of(kind), encoding="utf-8")
    for width, dark in product((400, 1600), (False, True)):
        browser.open(file, width=width, dark=dark)
        assert browser.requests == [file.as_uri()]
        assert browser.evaluate("document.scripts.length") == 0
        assert browser.evaluate("window.pwned ?? window.PWNED ?? null") is None
        assert browser.layout_problems() == []
        paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 3 * 128) == dark


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_charts_have_the_themes_colours(browser: Browser, tmp_path: Path, dark: bool) -> None:
    file = tmp_path / "report.html"
    file.write_text(page_of("plain"), encoding="utf-8")
    browser.open(file, width=1600, dark=dark)
    for name, drawn in CHART.items():
        selector = f"document.querySelector('svg [fill=\"{drawn[0]}\"]')"
        fill = browser.evaluate(f"{selector} ? getComputedStyle({selector}).fill : null")
        assert fill in (None, as_rgb(drawn[dark])), name


def as_rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))})"


@needs_chromium
def test_values_are_told_under_the_pointer(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page_of("plain"), encoding="utf-8")
    browser.open(file, width=1600, dark=False)
    told = browser.evaluate("""(() => {
      const svg = [...document.querySelectorAll("svg")].find(e => e.getClientRects().length);
      svg.scrollIntoView({block: "center"});
      const b = svg.getBoundingClientRect();
      const at = document.elementFromPoint(b.left + b.width / 2, b.top + b.height / 2);
      return at.querySelector("title")?.textContent ?? at.outerHTML;
    })()""")
    when, *values = told.splitlines()
    assert re.fullmatch(r"[\d.]+ to [\d.]+ min", when)
    assert [value.partition(":")[0] for value in values] == [
        "the whole pool",
        "paged and shared",
        "paged alone",
        "reserved",
    ]


@needs_chromium
def test_a_layout_problem_would_be_seen(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    broken = "<p style='position:absolute;top:0;left:0'>on top</p><p style='width:2000px'>wide</p>"
    html = page_of("plain").replace("<main>", f"<main>{broken}")
    file.write_text(
        html.replace("svg text { font-size: 14px", "svg text { font-size: 80px"), encoding="utf-8"
    )
    browser.open(file, width=400, dark=False)
    problems = "\n".join(browser.layout_problems())
    for kind in ("wide", "outside", "overlap", "label outside its chart"):
        assert kind in problems
