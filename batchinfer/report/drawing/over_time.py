"""Charts of what there was over time: areas on each other, or over each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import altair as alt
import numpy as np
import numpy.typing as npt

from batchinfer.report.drawing.palette import edge, light
from batchinfer.report.drawing.svg import COUNT_LABELS, Shape, axis, draw, hover_marks, sparse_axis

Float = npt.NDArray[np.float64]
HOVERS = 48
"""Spans of time whose values are told under the pointer."""
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Layer:
    """A series over time."""

    colour: str
    label: str
    values: Float
    is_line: bool = False

    @property
    def name(self) -> str:
        """The label without what explains it, after a colon."""
        return self.label.partition(":")[0]


@dataclass(frozen=True)
class Series:
    """What a chart shows, and of when.

    Args:
        name: what it is, for who cannot see it.
        edges_s: bounds of the slices of time, one more than there are values.
        layers: lowest first; each lies on those before it, or, of those that are not ``stacked``,
            over them.
        unit: of the values: ``bytes``, or what is counted.
        say: a value with its unit.
    """

    name: str
    edges_s: Float
    layers: Sequence[Layer]
    unit: str
    say: Callable[[float], str]
    stacked: bool = True


def over_time(series: Series, shape: Shape) -> str:
    """SVG of a chart of some series."""
    seconds, time_unit = _time_unit(float(series.edges_s[-1]))
    layers = _stacked(series.layers) if series.stacked else series.layers
    most = max(float(layer.values.max(initial=0)) for layer in layers)
    scale, byte_unit = _byte_unit(most) if series.unit == "bytes" else (1.0, "")
    x = alt.X(
        "t:Q",
        title=None,
        scale=alt.Scale(domain=[0.0, max(series.edges_s[-1] / seconds, 1e-9)], nice=False),
        axis=sparse_axis(
            tickCount=shape[0] // 75,
            grid=False,
            domain=True,
            labelExpr=f"format(datum.value, '~r') + ' {time_unit}'",
        ),
    )
    y = alt.Y(
        "y:Q",
        title=None,
        scale=alt.Scale(domainMin=0, domainMax=max(most / scale, 1e-9), nice=True),
        axis=axis(tickCount=5, labelExpr=_value_labels(byte_unit)),
    )
    times = (series.edges_s[1:] + series.edges_s[:-1]) / 2 / seconds
    times[0], times[-1] = 0.0, series.edges_s[-1] / seconds
    marks = [_mark(layer, times, scale).encode(x=x, y=y) for layer in layers]
    hover = hover_marks(list(_hovers(series, seconds, time_unit)))
    return draw(alt.layer(*marks, hover), shape, series.name)


def _stacked(layers: Sequence[Layer]) -> list[Layer]:
    """Layers on each other, the highest first: so it is drawn behind."""
    areas = [layer for layer in layers if not layer.is_line]
    tops = np.cumsum([np.maximum(layer.values, 0) for layer in areas], axis=0)
    stack = [replace(layer, values=top) for layer, top in zip(areas, tops, strict=True)]
    return [*stack[::-1], *(layer for layer in layers if layer.is_line)]


def _hovers(series: Series, seconds: float, time_unit: str) -> Iterator[dict[str, Any]]:
    """Means of a few slices of time each, in words."""
    slices = np.array_split(np.arange(len(series.edges_s) - 1), HOVERS)
    for found in filter(len, slices):
        bounds = series.edges_s[[found[0], found[-1] + 1]] / seconds
        values = [
            f"{layer.name}: {series.say(float(layer.values[found].mean()))}"
            for layer in series.layers[::-1]
        ]
        when = f"{bounds[0]:.3g} to {bounds[1]:.3g} {time_unit}"
        text = "; ".join([when, *values])
        yield {"from": float(bounds[0]), "to": float(bounds[1]), "text": text}


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
    is_pale = edge(layer.colour) != layer.colour
    line = alt.OverlayMarkDef(color=light(edge(layer.colour) if is_pale else "card"))
    line.strokeWidth = 1.25
    return chart.mark_area(color=light(layer.colour), opacity=1, line=line)


def _value_labels(byte_unit: str) -> str:
    """Labels of values: bytes with their unit; what is counted stands above the chart."""
    if byte_unit:
        return f"format(datum.value, '~r') + ' {byte_unit}'"
    return COUNT_LABELS


def _time_unit(span_s: float) -> tuple[float, str]:
    if span_s < 180:
        return 1.0, "s"
    return (60.0, "min") if span_s < 3 * 3600 else (3600.0, "h")


def _byte_unit(most: float) -> tuple[float, str]:
    power = 0
    while most >= 1024 and power < len(_BYTE_UNITS) - 1:
        most, power = most / 1024, power + 1
    return 1024.0**power, _BYTE_UNITS[power]
