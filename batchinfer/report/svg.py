"""Draws charts as SVG: areas over time, and histograms, with values as tooltips (SVG titles).

A chart contains only numbers and batchinfer's own words; text from data stays on the page around
the chart.

Every shape, or its edge, has a contrast ratio of at least 3 to the card behind it (WCAG 2.2,
success criterion 1.4.11). A line in the card's color separates areas that touch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from batchinfer.console.format import counted
from batchinfer.report.histograms import Bars
from batchinfer.report.timeline import Float

CHART = {
    "used": ("#2f62a3", "#6ea2e6"),
    "shared": ("#0f857b", "#3fb8ad"),
    "saved": ("#cfe9e5", "#1b403e"),
    "saved-edge": ("#0f857b", "#3fb8ad"),
    "waste": ("#b8690f", "#e0a04c"),
    "cached": ("#d9dfe7", "#333d4a"),
    "cached-edge": ("#74808f", "#8b97a6"),
    "contiguous": ("#f3e8d6", "#393022"),
    "contiguous-edge": ("#a27a35", "#b3925e"),
    "logical": ("#c7d8ee", "#2a4364"),
    "logical-edge": ("#5780b3", "#6c95c8"),
    "idle": ("#728090", "#8d99a9"),
    "swapped": ("#8a62a8", "#b08acb"),
    "again": ("#c0503f", "#e27f6f"),
    "ink": ("#4d5663", "#aab4c1"),
    "line": ("#dfe3e8", "#2b333d"),
    "card": ("#ffffff", "#191f26"),
}
"""Colors of the light and the dark theme; each color has one meaning. Edges make pale areas
visible."""
Shape = tuple[int, int]
"""Width and height in SVG units; the page scales a chart to its column."""
WIDE: Shape = (1090, 300)
NARROW: Shape = (440, 240)
TOOLTIPS = 48
"""Number of spans of time in a chart; each span has a tooltip."""
_TOP, _RIGHT, _BOTTOM = 12, 22, 30
_LEFT, _CHARACTER = 28, 6.5
"""Space to the left of labels, and the width of a label's character. Labels are a sixth larger on a
phone.
"""
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_AXIS = f'font-size="12" fill="{CHART["ink"][0]}"'


def light(name: str) -> str:
    return CHART[name][0]


def edge(name: str) -> str:
    """Return the name of the color that an area of color ``name`` has at its edge."""
    return f"{name}-edge" if f"{name}-edge" in CHART else name


def chart_rules() -> Iterator[str]:
    """Yield CSS rules that give charts the theme's colors.

    The SVG itself has the light colors, so that it also works outside the page.
    """
    for name, (color, _) in CHART.items():
        yield f'svg [fill="{color}"]{{fill:var(--{name})}}'
        yield f'svg [stroke="{color}"]{{stroke:var(--{name})}}'


@dataclass(frozen=True)
class Layer:
    """One area or line of a chart. A ``label`` may have an explanation after a colon."""

    color: str
    label: str
    values: Float
    is_line: bool = False


@dataclass(frozen=True)
class Series:
    """The contents of a chart over time.

    Args:
        name: a description for screen readers.
        edges_s: bounds of the slices of time: one more bound than a layer has values.
        layers: layers from the lowest up. Layers that are not ``stacked`` overlap.
        unit: ``bytes``, or a plural noun such as ``rows``.
        format_value: formats a value with its unit.
    """

    name: str
    edges_s: Float
    layers: Sequence[Layer]
    unit: str
    format_value: Callable[[float], str]
    stacked: bool = True


class _Plot:
    """The coordinates and axes of a chart.

    Args:
        first, last: ends of the horizontal axis.
        most: the largest value; the vertical axis begins at 0.
        y_label: formats a value of the vertical axis.
        least_step: minimum distance between labels of the vertical axis.
    """

    def __init__(
        self,
        shape: Shape,
        first: float,
        last: float,
        most: float,
        y_label: Callable[[float], str],
        least_step: float = 0.0,
    ) -> None:
        self._shape = shape
        self._first, self._last = first, last
        step = max(_step(most, 10), least_step)
        self._highest = math.ceil(most / step) * step
        step = max(_step(self._highest, 5), least_step)
        self._y_labels = {y: y_label(y) for y in _ticks(0, self._highest, step)}
        self._left = _LEFT + _CHARACTER * max(map(len, self._y_labels.values()))
        self._right, self.bottom = shape[0] - _RIGHT, shape[1] - _BOTTOM

    def x(self, value: Any) -> Any:
        """Return the horizontal coordinate of a value, or of each value in an array."""
        share = (value - self._first) / (self._last - self._first)
        return self._left + share * (self._right - self._left)

    def y(self, value: Any) -> Any:
        """Return the vertical coordinate of a value, or of each value in an array."""
        return self.bottom - value / self._highest * (self.bottom - _TOP)

    def bar(self, start: float, stop: float, height: float | None = None, gap: float = 0.0) -> str:
        """Return the attributes of a rectangle from ``start`` to ``stop``.

        Args:
            height: value of the upper edge; None for the plot's full height.
            gap: space to leave free on the right.
        """
        left, right = self.x(start), self.x(stop)
        top = _TOP if height is None else self.y(height)
        size = f'width="{_short(right - left - gap)}" height="{_short(self.bottom - top)}"'
        return f'x="{_short(left)}" y="{_short(top)}" {size}'

    def svg(
        self,
        name: str,
        marks: Iterable[str],
        tooltips: Iterable[tuple[float, float, str]],
        x_step: float,
        x_label: Callable[[float], str],
    ) -> str:
        """Return the whole chart.

        Args:
            tooltips: the span and the text of each tooltip.
            x_step: distance between labels of the horizontal axis; every second label may be left
                out.
        """
        width, height = self._shape
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        return "".join(
            [
                f'{head} role="img" font-family="system-ui, sans-serif" fill="none" ',
                f'aria-label="{name}">',
                *self._axes(x_step, x_label),
                *marks,
                *(
                    f"<rect {self.bar(start, stop)}><title>{text}</title></rect>"
                    for start, stop, text in tooltips
                ),
                "</svg>",
            ]
        )

    def _axes(self, x_step: float, x_label: Callable[[float], str]) -> Iterator[str]:
        # Coordinates that end in .5 make thin lines fill whole pixels.
        rules = (
            f"M{_short(self._left)},{round(self.y(y)) + 0.5:g}H{self._right}"
            for y in self._y_labels
        )
        yield f'<path d="{"".join(rules)}" stroke="{light("line")}"/>'
        yield f'<g {_AXIS} text-anchor="end">'
        for y, label in self._y_labels.items():
            yield f'<text x="{_short(self._left - 8)}" y="{_short(self.y(y) + 4)}">{label}</text>'
        yield f'</g><g {_AXIS} text-anchor="middle">'
        labels = {x: x_label(x) for x in _ticks(self._first, self._last, x_step)}
        room = x_step / (self._last - self._first) * (self._right - self._left)
        every = 1 if room > (_CHARACTER + 1) * max(map(len, labels.values())) + 6 else 2
        for x, label in list(labels.items())[::every]:
            yield f'<text x="{_short(self.x(x))}" y="{self.bottom + 20}">{label}</text>'
        yield "</g>"


def over_time(series: Series, shape: Shape) -> str:
    span_s = max(float(series.edges_s[-1]), 1e-9)
    unit_s, time_unit = _time_unit(span_s)
    edges = series.edges_s / unit_s
    layers = _stacked(series.layers) if series.stacked else series.layers
    most = max(float(layer.values.max(initial=0)) for layer in layers) or 1.0
    scale, y_label = 1.0, _count_label
    if series.unit == "bytes":
        power = min(int(math.log2(max(most, 1.0)) / 10), len(_BYTE_UNITS) - 1)
        scale, byte_unit = 1024.0**power, _BYTE_UNITS[power]
        y_label = lambda value: f"{value:.10g} {byte_unit}"  # noqa: E731
    plot = _Plot(shape, 0.0, span_s / unit_s, most / scale, y_label)
    times = (edges[1:] + edges[:-1]) / 2
    times[0], times[-1] = edges[0], edges[-1]
    return plot.svg(
        series.name,
        [_mark(plot, layer, times, layer.values / scale) for layer in layers],
        _means(series, edges, time_unit),
        _step(span_s / unit_s, shape[0] // 75),
        lambda value: f"{value:.10g} {time_unit}",
    )


def histogram(bars: Bars, color: str, name: str) -> str:
    counts = zip(bars.starts, bars.counts, strict=True)
    spans = [(start, start + bars.width, count) for start, count in counts]
    plot = _Plot(NARROW, spans[0][0], spans[-1][1], max(bars.counts), _count_label, least_step=1.0)
    marks = (
        f'<rect {plot.bar(start, stop, count, gap=1.0)} fill="{light(color)}"/>'
        for start, stop, count in spans
    )
    tooltips = (
        (start, stop, f"{_tokens(start, stop - 1)}\n{counted(count, 'row')}")
        for start, stop, count in spans
    )
    step = max(1.0, _step(spans[-1][1] - spans[0][0], 6))
    return plot.svg(name, marks, tooltips, step, _count_label)


def _tokens(first: int, last: int) -> str:
    return counted(first, "token") if first == last else f"{first:,} to {last:,} tokens"


def _stacked(layers: Sequence[Layer]) -> list[Layer]:
    """Stack the layers; return the highest layer first, because it is drawn behind the others."""
    areas = [layer for layer in layers if not layer.is_line]
    tops = np.cumsum([np.maximum(layer.values, 0) for layer in areas], axis=0)
    stack = [replace(layer, values=top) for layer, top in zip(areas, tops, strict=True)]
    return [*stack[::-1], *(layer for layer in layers if layer.is_line)]


def _means(series: Series, edges: Float, time_unit: str) -> Iterator[tuple[float, float, str]]:
    """Yield spans of a few slices of time each, with the means of all layers."""
    for slices in filter(len, np.array_split(np.arange(len(edges) - 1), TOOLTIPS)):
        start, stop = edges[slices[0]], edges[slices[-1] + 1]
        lines = [f"{start:.3g} to {stop:.3g} {time_unit}"]
        for layer in series.layers[::-1]:
            mean = series.format_value(float(layer.values[slices].mean()))
            lines.append(f"{layer.label.partition(':')[0]}: {mean}")
        yield start, stop, "\n".join(lines)


def _mark(plot: _Plot, layer: Layer, times: Float, values: Float) -> str:
    """Return the path of a line, or of an area and its upper edge."""
    points = zip(plot.x(times), plot.y(values), strict=True)
    path = " ".join(f"{_short(x)},{_short(y)}" for x, y in points)
    if layer.is_line:
        stroke = f'stroke="{light(layer.color)}" stroke-width="1.5" stroke-dasharray="5,4"'
        return f'<path d="M{path}" {stroke}/>'
    top = edge(layer.color) if edge(layer.color) != layer.color else "card"
    ends = f"V{plot.bottom}H{_short(plot.x(times[0]))}Z"
    return (
        f'<path d="M{path}{ends}" fill="{light(layer.color)}"/>'
        f'<path d="M{path}" stroke="{light(top)}" stroke-width="1.25"/>'
    )


def _step(span: float, count: int) -> float:
    """Return 1, 2 or 5 times a power of ten, so that a span has about ``count`` such steps.

    As in d3-array's ``ticks``, the thresholds are geometric means of neighboring factors.
    """
    power = 10.0 ** math.floor(math.log10(span / count))
    excess = span / count / power
    factors = ((10, math.sqrt(50)), (5, math.sqrt(10)), (2, math.sqrt(2)))
    return power * next((factor for factor, least in factors if excess >= least), 1)


def _ticks(first: float, last: float, step: float) -> list[float]:
    numbers = range(math.ceil(first / step - 1e-9), math.floor(last / step + 1e-9) + 1)
    return [number * step for number in numbers]


def _count_label(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.10g}{suffix}"
    return f"{value:.10g}"


def _time_unit(span_s: float) -> tuple[float, str]:
    if span_s < 180:
        return 1.0, "s"
    return (60.0, "min") if span_s < 3 * 3600 else (3600.0, "h")


def _short(number: float) -> str:
    return f"{round(number, 1):g}"
