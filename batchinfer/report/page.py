"""Makes the page of a report: one HTML file without scripts or network requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from batchinfer.console.format import duration
from batchinfer.report import captions, lanes
from batchinfer.report.charts import all_series
from batchinfer.report.report_data import Price, ReportData
from batchinfer.report.sanitize import cut, sanitize
from batchinfer.report.svg import (
    CHART,
    NARROW,
    WIDE,
    Series,
    Shape,
    chart_rules,
    edge,
    histogram,
    over_time,
)
from batchinfer.report.units import moment, percent

PAGE = {
    "paper": ("#f6f7f9", "#12161b"),
    "text": ("#1b2128", "#e7ebf0"),
    "soft": ("#59636f", "#9aa6b3"),
    "rule": ("#e2e6eb", "#2b333d"),
    "bad": ("#a93226", "#ef8a7d"),
    "good": ("#1a7a52", "#55c393"),
    "rest": ("#96566c", "#cf8fa3"),
}
"""Colors of the page in the light and dark theme; ``CHART`` has the colors of charts. Text has a
contrast ratio of at least 4.5 to its background (WCAG 2.2, success criterion 1.4.3).
"""
_MOST_RUNS, _MOST_CODES, _MOST_LANES = 20, 12, 40


def page(data: ReportData, price: Price | None = None) -> str:
    """Return the report on ``data`` as HTML, with the cost if the machine's ``price`` is given."""
    environment = _environment()
    light, dark = (Markup("".join(_variables(theme))) for theme in (0, 1))
    rules = Markup("\n".join(chart_rules()))
    style = environment.from_string(_read("page.css"))
    job = _with_values(data.job)
    return environment.from_string(_read("page.html.jinja")).render(
        data=data,
        captions=captions,
        style=Markup(style.render(light=light, dark=dark, chart_rules=rules)),
        outcome=captions.outcome(data),
        progress=captions.progress(data),
        contents=list(_contents(data, job)),
        figures=list(captions.figures(data, price)),
        charts=_charts(data) if data.timeline.totals.steps else None,
        histograms=list(_histograms(data)),
        lane_key=lanes.key(data.lanes),
        job=job,
        most_runs=_MOST_RUNS,
        most_codes=_MOST_CODES,
        most_lanes=_MOST_LANES,
    )


def _contents(data: ReportData, job: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yield the anchor, the name and the number of errors of each section of the page."""
    has_steps = bool(data.timeline.totals.steps)
    sections = [
        ("failure", "Why it failed", data.error),
        ("errors", "Errors", data.failures),
        ("memory", "Memory", has_steps and data.has_pool),
        ("pool", "Pool", has_steps and data.has_pool),
        ("at-a-time", "At a time", has_steps),
        ("speed", "Tokens per second", has_steps),
        ("sharing", "Sharing", data.has_pool and data.lengths.sums["prompt_tokens"]),
        ("lengths", "Lengths", data.lengths.rows),
        ("workers", "Workers", data.lanes),
        ("time", "Time", data.total_s),
        ("rows", "A few rows", data.examples),
        ("runs", "Runs", len(data.runs) > 1),
        ("job", "The job", job),
    ]
    for anchor, name, is_shown in sections:
        if is_shown:
            yield anchor, name, data.rows_failed if anchor == "errors" else 0


def _charts(data: ReportData) -> dict[str, Any]:
    series = all_series(data)
    charts = {name: _chart(one, NARROW) for name, one in series.items()}
    return {**charts, "memory_wide": _chart(series["memory"], WIDE)} if data.has_pool else charts


def _chart(series: Series, shape: Shape) -> dict[str, Any]:
    key = [("dashed" if layer.is_line else layer.color, layer.label) for layer in series.layers]
    return {"svg": Markup(over_time(series, shape)), "key": key, "unit": series.unit}


def _histograms(data: ReportData) -> Iterator[dict[str, Any]]:
    per_row = "tokens of all samples of a row" if data.unit == "sequence" else "tokens of a row"
    for name, title, color, what in (
        ("prompt_tokens", "Lengths of prompts", "shared", "tokens of the prompt"),
        ("output_tokens", "Lengths of answers", "used", per_row),
    ):
        bars = data.lengths.bars(name)
        if bars is None or (name == "output_tokens" and not data.draws):
            continue
        caption = (
            f"Rows by {what}. Half have at most {bars.median:,}, the longest has {bars.most:,}"
        )
        beyond = bars.most >= bars.starts[-1] + bars.width
        caption += "; the last bar includes longer rows." if beyond else "."
        svg = Markup(histogram(bars, color, title.lower()))
        yield {"title": title, "caption": caption, "svg": svg, "unit": "rows, by tokens"}


def _with_values(job: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    kept = {
        section: {name: value for name, value in keys.items() if value not in (None, [], {}, "")}
        for section, keys in job.items()
    }
    return {section: keys for section, keys in kept.items() if keys}


def _variables(theme: int) -> Iterator[str]:
    """Yield a CSS variable for each color and its edge; ``theme`` is 0 for light, 1 for dark."""
    for name, colors in {**CHART, **PAGE}.items():
        yield f"--{name}:{colors[theme]};"
        if edge(name) == name:
            yield f"--{name}-edge:{colors[theme]};"


def _read(name: str) -> str:
    return (files("batchinfer.report") / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_sanitized)
    environment.filters.update(
        cut=lambda text, limit: cut(str(text), limit),
        thousands=lambda count: f"{count:,}",
        as_json=_as_json,
        duration=duration,
        moment=moment,
        percent=percent,
        options=_with_options,
        pieces=_pieces,
    )
    return environment


def _pieces(slices: Sequence[captions.Slice]) -> list[lanes.Piece]:
    whole = sum(part.amount for part in slices) or 1.0
    return [
        lanes.Piece(part.color, part.amount / whole, f"{part.label}: {part.value}")
        for part in slices
    ]


def _with_options(text: str) -> Markup:
    """Mark command-line options in batchinfer's texts as code that does not wrap."""
    return Markup(re.sub(r"--[a-z-]+", r'<span class="code whole">\g<0></span>', str(escape(text))))


def _sanitized(value: Any) -> Any:
    """Sanitize every text on the page except batchinfer's own markup."""
    return sanitize(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _as_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
