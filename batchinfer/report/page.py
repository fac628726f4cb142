"""A report's page: HTML with all that it needs in it, no scripts, nothing to fetch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup, escape

from batchinfer.console.format import duration
from batchinfer.report import captions, charts, lanes
from batchinfer.report.drawing import palette
from batchinfer.report.drawing.histogram import histogram
from batchinfer.report.drawing.over_time import Series, over_time
from batchinfer.report.drawing.svg import NARROW, WIDE, Shape
from batchinfer.report.outcome import outcome, progress
from batchinfer.report.report_data import Findings, Price
from batchinfer.report.sanitize import cut, sanitize
from batchinfer.report.units import moment, percent

_MOST_RUNS, _MOST_CODES, _MOST_LANES = 20, 12, 40


def page(found: Findings, price: Price | None = None) -> str:
    """The report on ``found``, as HTML.

    Args:
        price: of the machine; None: no cost is given.
    """
    job = _with_values(found.job)
    texts = {
        "outcome": outcome(found),
        "progress": progress(found),
        "memory": captions.memory(found),
        "pool": captions.pool(found),
        "contents": list(_contents(found)),
        "figures": list(captions.figures(found, price)),
        "pressure": captions.pressure_caption(found),
        "sharing": captions.sharing_caption(found),
        "together": captions.together(found),
        "prompt_slices": captions.prompt_slices(found),
        "memory_slices": captions.memory_slices(found),
        "time_slices": captions.time_slices(found),
        "waits": captions.waits(found),
        "lanes_said": captions.lanes_caption(found),
        "lane_key": lanes.key(found.lanes),
    }
    text: str = (
        _environment()
        .get_template("page")
        .render(
            found=found,
            style=_style(),
            charts=_charts(found) if found.timeline.totals.steps else None,
            histograms=list(_histograms(found)),
            job=job,
            num_keys=sum(map(len, job.values())),
            most_runs=_MOST_RUNS,
            most_codes=_MOST_CODES,
            most_lanes=_MOST_LANES,
            **texts,
        )
    )
    return text


def _contents(found: Findings) -> Iterator[tuple[str, str, int]]:
    """Sections of the page: anchor, name, and how many errors there are."""
    has_steps, has_rows = bool(found.timeline.totals.steps), bool(found.lengths.rows)
    sections = [
        ("failure", "Why it failed", found.error),
        ("errors", "Errors", found.failures),
        ("memory", "Memory", has_steps and found.has_pool),
        ("pool", "Pool", has_steps and found.has_pool),
        ("side-by-side", "Side by side", has_steps),
        ("speed", "Tokens per second", has_steps),
        ("sharing", "Sharing", found.has_pool and found.lengths.sums["prompt_tokens"]),
        ("lengths", "Lengths", has_rows),
        ("workers", "Workers", found.lanes),
        ("time", "Time", found.total_s),
        ("rows", "A few rows", found.examples),
        ("runs", "Runs", len(found.runs) > 1),
        ("job", "The job", _with_values(found.job)),
    ]
    for anchor, name, is_there in sections:
        if is_there:
            yield anchor, name, found.rows_failed if anchor == "errors" else 0


def _charts(found: Findings) -> dict[str, Any]:
    series = charts.all_series(found)
    drawn = {name: _chart(what, NARROW) for name, what in series.items()}
    wide = {"memory_wide": _chart(series["memory"], WIDE)} if found.has_pool else {}
    return {**drawn, **wide}


def _chart(series: Series, shape: Shape) -> dict[str, Any]:
    key = [("dashed" if layer.is_line else layer.colour, layer.label) for layer in series.layers]
    svg = Markup(over_time(series, shape))  # numbers and this program's words alone
    return {"svg": svg, "key": key, "unit": series.unit}


def _histograms(found: Findings) -> Iterator[dict[str, Any]]:
    per_row = "tokens of all samples of a row" if found.unit == "sequences" else "tokens of a row"
    for name, title, colour in (
        ("prompt_tokens", "Lengths of prompts", "shared"),
        ("output_tokens", "Lengths of answers", "used"),
    ):
        bars = found.lengths.bars(name)
        if bars is not None and (found.draws or name == "prompt_tokens"):
            caption = f"Rows by {'tokens of the prompt' if colour == 'shared' else per_row}."
            caption += f" Half have at most {bars.median:,}, the longest has {bars.most:,}"
            beyond = bars.most >= bars.starts[-1] + bars.width
            caption += "; those beyond the scale are in the last bar." if beyond else "."
            shown = (bars.starts, bars.width, bars.counts)
            svg = Markup(histogram(*shown, colour, NARROW, title.lower()))
            yield {"title": title, "caption": caption, "svg": svg, "unit": "rows, by tokens"}


def _with_values(job: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The job's keys that have a value, by their sections."""
    kept = {
        section: {name: value for name, value in keys.items() if value not in (None, [], {}, "")}
        for section, keys in job.items()
    }
    return {section: keys for section, keys in kept.items() if keys}


@cache
def _style() -> Markup:
    template = _environment().get_template("style")
    light, dark = (Markup("".join(palette.variables(theme))) for theme in (0, 1))
    rules = Markup("\n".join(palette.chart_rules()))
    return Markup(template.render(light=light, dark=dark, chart_rules=rules))


@cache
def _environment() -> Environment:
    folder = files("batchinfer.report")
    pages = {name: f"{name}.html.jinja" for name in ("page", "sections", "macros")}
    names = {**pages, "style": "page.css"}
    environment = Environment(
        loader=DictLoader({n: (folder / f).read_text(encoding="utf-8") for n, f in names.items()}),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_cleaned,
    )
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


def _pieces(slices: Sequence[captions.Slice | lanes.Piece]) -> list[tuple[str, float, str]]:
    """Slices of a bar or pieces of a lane: colour, share, and what it is."""
    whole = sum(piece.amount for piece in slices if isinstance(piece, captions.Slice)) or 1.0
    return [
        (piece.colour, piece.amount / whole, f"{piece.label}: {piece.value}")
        if isinstance(piece, captions.Slice)
        else (piece.colour, piece.share, "")
        for piece in slices
    ]


def _with_options(text: str) -> Markup:
    """Words of this program's own, with the options in them as code, which is not broken."""
    return Markup(re.sub(r"--[a-z-]+", r'<span class="code whole">\g<0></span>', str(escape(text))))


def _cleaned(value: Any) -> Any:
    """Text made fit for the page, but for markup that this program has written itself."""
    return sanitize(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _as_json(value: Any) -> str:
    """A key's value as a job file has it."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
