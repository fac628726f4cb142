"""A report's charts, as SVG: altair describes them, vl-convert draws them.

There is no text in them but numbers: what names come from data stands in the page around them.
Charts are drawn in the light theme's colours, which makes them whole pictures by themselves. In the
dark theme the page's style sheet puts the dark ones in their place, by what they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import vl_convert

from batchinfer.report.histograms import Bars, Float
from batchinfer.report.timeline import Timeline

CHART = {
    "used": ("#3467a8", "#5f95dc"),
    "shared": ("#1c8f86", "#3fb8ad"),
    "waste": ("#d98a2b", "#e0a04c"),
    "cached": ("#c3cad5", "#515c6d"),
    "contiguous": ("#ecdcc4", "#46392a"),
    "edge": ("#c39b5f", "#b08c57"),
    "logical": ("#b5cae6", "#2c4668"),
    "swapped": ("#8a62a8", "#b08acb"),
    "again": ("#c0503f", "#e27f6f"),
    "ink": ("#4d5663", "#aab4c1"),
    "line": ("#dfe3e8", "#2b333d"),
}
"""Light and dark, by what is drawn; each colour is used for one thing."""
PAGE = {
    "paper": ("#f6f7f9", "#12161b"),
    "card": ("#ffffff", "#191f26"),
    "text": ("#1b2128", "#e7ebf0"),
    "soft": ("#59636f", "#9aa6b3"),
    "rule": ("#e2e6eb", "#2b333d"),
    "bad": ("#a93226", "#ef8a7d"),
    "good": ("#1a7a52", "#55c393"),
    "plain": ("#8d97a3", "#6d7885"),
}

WIDE, NARROW = (1090, 300), (440, 240)
"""Width and height of charts in units of the page's own: they are scaled to the place they get."""
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_FONT = "system-ui, sans-serif"


def light(name: str) -> str:
    """A colour of ``CHART`` as charts are drawn."""
    return CHART[name][0]


def variables(theme: int) -> Iterator[str]:
    """CSS declarations of all colours: 0 light, 1 dark."""
    for name, colours in {**CHART, **PAGE}.items():
        yield f"--{name}: {colours[theme]};"


def chart_rules() -> Iterator[str]:
    """CSS rules that give a chart the theme's colours."""
    for name, (drawn, _) in CHART.items():
        yield f'svg [fill="{drawn}"] {{ fill: var(--{name}); }}'
        yield f'svg [stroke="{drawn}"] {{ stroke: var(--{name}); }}'


@dataclass(frozen=True)
class Layer:
    """A series over time."""

    colour: str
    values: Float
    is_line: bool = False


def memory_for_the_rows(timeline: Timeline, shape: tuple[int, int]) -> str:
    """Chart of the memory that running rows took and would have taken, one drawn over the other."""
    states = timeline.states
    layers = [
        Layer("contiguous", states("contiguous_blocks")),
        Layer("logical", states("kv_logical_blocks")),
        Layer("used", states("kv_blocks_used")),
    ]
    if pool_is_drawn(timeline):
        layers.append(Layer("ink", states("kv_blocks_total"), is_line=True))
    return _over_time(timeline, layers, shape, "the memory that running rows take", is_bytes=True)


def pool_is_drawn(timeline: Timeline) -> bool:
    """Whether the whole pool is on the scale of what rows take."""
    pool, most = timeline.states("kv_blocks_total"), timeline.states("contiguous_blocks")
    return bool(pool.max(initial=0) <= 1.5 * most.max(initial=0))


def inside_the_pool(timeline: Timeline, shape: tuple[int, int]) -> str:
    """Chart of the pool's blocks by use, stacked."""
    states = timeline.states
    used, waste = states("kv_blocks_used"), states("waste_blocks")
    # What is shared are full blocks nearly always; where it is not, its empty slots are waste.
    shared = np.minimum(states("kv_blocks_shared"), used - waste)
    layers = [
        Layer("shared", shared),
        Layer("used", used - shared - waste),
        Layer("waste", waste),
        Layer("cached", states("kv_blocks_cached")),
    ]
    return _over_time(
        timeline, _stacked(layers), shape, "what the pool's blocks hold", is_bytes=True
    )


def running(timeline: Timeline, shape: tuple[int, int]) -> str:
    """Chart of the sequences that run, and of those whose blocks are on the host."""
    states = timeline.states
    layers = [Layer("used", states("num_running")), Layer("swapped", states("num_swapped"))]
    return _over_time(timeline, _stacked(layers), shape, "sequences that run")


def waiting(timeline: Timeline, shape: tuple[int, int]) -> str:
    """Chart of the rows in the engine's queue."""
    layers = [Layer("cached", timeline.states("num_waiting"))]
    return _over_time(timeline, layers, shape, "rows in the queue")


def tokens_per_second(timeline: Timeline, shape: tuple[int, int]) -> str:
    """Chart of tokens per second: of prompts, recomputed, of answers."""
    again = timeline.rate("recomputed_tokens")
    layers = [
        Layer("used", timeline.rate("decode_tokens")),
        Layer("shared", np.maximum(timeline.rate("prefill_tokens") - again, 0)),
        Layer("again", again),
    ]
    return _over_time(timeline, _stacked(layers), shape, "tokens per second")


def histogram(bars: Bars, colour: str, shape: tuple[int, int], label: str) -> str:
    """Histogram of rows by length."""
    rows = [
        {"from": start, "to": start + bars.width, "rows": count}
        for start, count in zip(bars.starts, bars.counts, strict=True)
    ]
    chart = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_bar(color=light(colour), binSpacing=1)
        .encode(
            x=alt.X(
                "from:Q",
                bin="binned",
                title=None,
                axis=_axis(
                    tickCount=6,
                    format="~s",
                    labelFlush=False,
                    labelOverlap=True,
                    labelSeparation=14,
                ),
            ),
            x2="to:Q",
            y=alt.Y("rows:Q", title=None, axis=_axis(tickCount=4, format="~s", tickMinStep=1)),
        )
    )
    return _svg(chart, shape, label)


def _stacked(layers: Sequence[Layer]) -> list[Layer]:
    """Layers stacked, each on those before it; the highest is drawn first."""
    tops = np.cumsum([np.maximum(layer.values, 0) for layer in layers], axis=0)
    return [Layer(layer.colour, top) for layer, top in zip(layers, tops, strict=True)][::-1]


def _over_time(
    timeline: Timeline,
    layers: Sequence[Layer],
    shape: tuple[int, int],
    label: str,
    *,
    is_bytes: bool = False,
) -> str:
    seconds, time_unit = _time_unit(timeline.span_s)
    most = max(float(layer.values.max(initial=0)) for layer in layers)
    scale, unit = _byte_unit(most) if is_bytes else (1.0, "")
    times = timeline.middles_s / seconds
    times[0], times[-1] = 0.0, timeline.span_s / seconds
    domain = [0.0, max(timeline.span_s / seconds, 1e-9)]
    ticks = f"format(datum.value, datum.value < 1000 || {str(is_bytes).lower()} ? '~r' : '~s')"
    x = alt.X(
        "t:Q",
        title=None,
        scale=alt.Scale(domain=domain, nice=False),
        axis=_axis(
            tickCount=shape[0] // 75,
            grid=False,
            domain=True,
            labelExpr=f"format(datum.value, '~r') + ' {time_unit}'",
            labelFlush=False,
            labelOverlap=True,
            labelSeparation=14,
        ),
    )
    y = alt.Y(
        "y:Q",
        title=None,
        scale=alt.Scale(domainMin=0, domainMax=max(most / scale, 1e-9), nice=True),
        axis=_axis(tickCount=5, labelExpr=f"{ticks} + ' {unit}'" if unit else ticks),
    )
    marks = [_mark(layer, times, scale).encode(x=x, y=y) for layer in layers]
    return _svg(alt.layer(*marks), shape, label)


def _mark(layer: Layer, times: Float, scale: float) -> Any:
    values = [
        {"t": float(f"{t:.5g}"), "y": float(f"{value:.5g}")}
        for t, value in zip(times, layer.values / scale, strict=True)
    ]
    chart = alt.Chart(alt.InlineData(values=values))
    if layer.is_line:
        return chart.mark_line(
            color=light(layer.colour), strokeDash=[5, 4], strokeWidth=1.5, interpolate="step"
        )
    edged = layer.colour == "contiguous"
    edge: Any = alt.OverlayMarkDef(color=light("edge"), strokeWidth=1.25) if edged else False
    return chart.mark_area(color=light(layer.colour), opacity=1, line=edge)


def _axis(**changes: Any) -> alt.Axis:
    plain: dict[str, Any] = {
        "domain": False,
        "ticks": False,
        "labelPadding": 8,
        "labelFontSize": 12,
        "labelColor": light("ink"),
        "gridColor": light("line"),
        "domainColor": light("line"),
    }
    return alt.Axis(**{**plain, **changes})


def _svg(chart: Any, shape: tuple[int, int], label: str) -> str:
    width, height = shape
    whole = (
        chart.properties(
            width=width, height=height, autosize=alt.AutoSizeParams(type="fit", contains="padding")
        )
        .configure(background="transparent", font=_FONT, padding=4, aria=False)
        .configure_view(stroke=None)
    )
    drawn: str = vl_convert.vegalite_to_svg(whole.to_dict())
    viewed = re.search(r'viewBox="([\d. -]+)"', drawn)
    assert viewed is not None
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{viewed[1]}" role="img"'
    return re.sub(r"^<svg[^>]*>", f'{head} aria-label="{label}">', drawn.strip(), count=1)


def _time_unit(span_s: float) -> tuple[float, str]:
    if span_s < 180:
        return 1.0, "s"
    return (60.0, "min") if span_s < 3 * 3600 else (3600.0, "h")


def _byte_unit(most: float) -> tuple[float, str]:
    power = 0
    while most >= 1024 and power < len(_BYTE_UNITS) - 1:
        most, power = most / 1024, power + 1
    return 1024.0**power, _BYTE_UNITS[power]
