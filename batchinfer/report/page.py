"""A report's page: HTML with all that it needs in it, no scripts, nothing to fetch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from batchinfer.console.format import duration
from batchinfer.report import captions, charts, lanes
from batchinfer.report.report_data import Findings
from batchinfer.report.sanitize import cut, sanitize
from batchinfer.report.timeline import Timeline

_MOST_RUNS, _MOST_CODES, _MOST_LANES = 20, 12, 40


def page(found: Findings, price_per_hour: float | None = None) -> str:
    """The report on ``found``, as HTML.

    Args:
        price_per_hour: of the machine, in whatever currency; None: no cost is given.
    """
    timeline = found.timeline
    text: str = (
        _environment()
        .get_template("page")
        .render(
            found=found,
            style=_style(),
            state_class=_state_class(found.state),
            headline=captions.headline(found),
            pool=captions.pool(found),
            figures=list(captions.figures(found, price_per_hour)),
            charts=_charts(timeline) if timeline.totals.steps else None,
            pressure=captions.pressure_caption(found),
            swapped=timeline.states("num_swapped").any(),
            again=timeline.rate("recomputed_tokens").any(),
            histograms=list(_histograms(found)),
            sharing=captions.sharing_caption(found),
            prompt_slices=captions.prompt_slices(found),
            memory_slices=captions.memory_slices(found),
            time_slices=captions.time_slices(found),
            waits=captions.waits(found),
            most_runs=_MOST_RUNS,
            most_codes=_MOST_CODES,
            most_lanes=_MOST_LANES,
            lane_key=lanes.KEY,
            lanes_said=captions.lanes_caption(found),
        )
    )
    return text


def _charts(timeline: Timeline) -> dict[str, Any]:
    wide, narrow = charts.WIDE, charts.NARROW
    drawn = {
        "memory_wide": charts.memory_for_the_rows(timeline, wide),
        "memory": charts.memory_for_the_rows(timeline, narrow),
        "pool": charts.inside_the_pool(timeline, narrow),
        "running": charts.running(timeline, narrow),
        "tokens": charts.tokens_per_second(timeline, narrow),
        "waiting": charts.waiting(timeline, narrow),
    }
    svgs = {name: Markup(svg) for name, svg in drawn.items()}  # numbers alone
    return {**svgs, "pool_is_drawn": charts.pool_is_drawn(timeline)}


def _histograms(found: Findings) -> Iterator[dict[str, Any]]:
    per_row = "tokens of all samples of a row" if found.unit == "sequences" else "tokens of a row"
    for name, title, colour in (
        ("prompt_tokens", "Lengths of prompts", "shared"),
        ("output_tokens", "Lengths of answers", "used"),
    ):
        bars = found.lengths.bars(name)
        if bars is not None:
            caption = f"Rows by {'tokens of the prompt' if colour == 'shared' else per_row}."
            caption += f" Half have at most {bars.median:,}, the longest has {bars.most:,}"
            beyond = bars.most >= bars.starts[-1] + bars.width
            caption += "; those beyond the scale are in the last bar." if beyond else "."
            svg = charts.histogram(bars, colour, charts.NARROW, title.lower())
            yield {"title": title, "caption": caption, "svg": Markup(svg)}


def _state_class(state: str) -> str:
    return "errors" if "," in state else state if state in ("running", "stopped") else "finished"


@cache
def _style() -> Markup:
    template = _environment().get_template("style")
    light, dark = (Markup(" ".join(charts.variables(theme))) for theme in (0, 1))
    rules = Markup("\n".join(charts.chart_rules()))
    return Markup(template.render(light=light, dark=dark, chart_rules=rules))


@cache
def _environment() -> Environment:
    folder = files("batchinfer.report")
    names = {"page": "page.html.jinja", "style": "page.css"}
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
    )
    return environment


def _cleaned(value: Any) -> Any:
    """Text made fit for the page, but for markup that this program has written itself."""
    return sanitize(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _as_json(value: Any) -> str:
    """A key's value as a job file has it."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
