"""Charts: colors with enough contrast, readable axes, and tooltips with the drawn values."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest

from batchinfer.report.histograms import Bars
from batchinfer.report.page import PAGE
from batchinfer.report.svg import CHART, NARROW, TOOLTIPS, Layer, Series, edge, histogram, over_time

COLORS = {**CHART, **PAGE}
TEXTS = ("text", "soft", "bad", "good", "used", "ink")
BACKGROUNDS = ("card", "paper", "rule", "line")
SHAPES = sorted(set(COLORS) - set(BACKGROUNDS) - {"text", "soft", "ink"})


def luminance(color: str) -> float:
    """Return the relative luminance as defined by WCAG 2.2."""
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("name", "ground", "theme"), [*product(TEXTS, ("card", "paper"), (0, 1))])
def test_text_has_contrast(name: str, ground: str, theme: int) -> None:
    assert contrast(COLORS[name][theme], COLORS[ground][theme]) >= 4.5


@pytest.mark.parametrize(("name", "theme"), [*product(SHAPES, (0, 1))])
def test_shapes_have_contrast(name: str, theme: int) -> None:
    area, at_edge = COLORS[name][theme], COLORS[edge(name)][theme]
    assert contrast(at_edge, COLORS["card"][theme]) >= 3
    if area != at_edge:
        assert contrast(at_edge, area) >= 2.5


def titles(svg: str) -> list[str]:
    return re.findall(r"<title>([^<]*)</title>", svg)


@pytest.mark.parametrize("stacked", [False, True])
def test_tooltips_have_the_drawn_values(stacked: bool) -> None:
    rng = np.random.default_rng(5)
    first, second = rng.random(240), 10 * rng.random(240)
    layers = [Layer("used", "first", first), Layer("cached", "second: explained", second)]
    series = Series("numbers", np.linspace(0, 24, 241), layers, "rows", repr, stacked)
    lines = [title.split("\n") for title in titles(over_time(series, NARROW))]
    assert len(lines) == TOOLTIPS
    assert lines[1][0] == "0.5 to 1 s"
    for at, (name, values) in ((2, ("first", first)), (1, ("second", second))):
        shown = [float(line[at].removeprefix(f"{name}: ")) for line in lines]
        assert shown == pytest.approx(values.reshape(TOOLTIPS, -1).mean(axis=1))


@pytest.mark.parametrize(
    ("span_s", "most", "unit", "x_labels", "y_labels"),
    [
        (0.0, 0.0, "rows", None, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (
            24.0,
            1900.0,
            "rows",
            ["0 s", "5 s", "10 s", "15 s", "20 s"],
            ["0", "500", "1k", "1.5k", "2k"],
        ),
        (9e4, 3e9, "bytes", ["0 h", "5 h", "10 h", "15 h", "20 h", "25 h"], None),
        (
            500.0,
            5e5,
            "bytes",
            None,
            ["0 KiB", "100 KiB", "200 KiB", "300 KiB", "400 KiB", "500 KiB"],
        ),
    ],
)
def test_axes_have_round_numbers(
    span_s: float, most: float, unit: str, x_labels: list[str] | None, y_labels: list[str] | None
) -> None:
    values = np.linspace(0, most, 240)
    series = Series("x", np.linspace(0, span_s, 241), [Layer("used", "x", values)], unit, repr)
    y_axis, x_axis = re.findall("<g font-size.*?</g>", over_time(series, NARROW))
    for axis, labels in ((y_axis, y_labels), (x_axis, x_labels)):
        assert labels in (None, re.findall(">([^<]+)</text>", axis))


def test_drawn_points_are_where_their_values_are() -> None:
    values = np.array([0.0, 50.0, 100.0, 25.0])
    series = Series("x", np.linspace(0, 4, 5), [Layer("used", "x", values)], "rows", repr)
    path = re.findall(r'<path d="M([\d., ]+)" stroke="#ffffff"', over_time(series, NARROW))[0]
    points = np.array([[float(n) for n in point.split(",")] for point in path.split(" ")])
    top, bottom = points[2, 1], points[0, 1]
    assert points[:, 1] == pytest.approx(bottom + values / 100 * (top - bottom), abs=0.1)
    left, right = points[0, 0], points[-1, 0]
    assert points[:, 0] == pytest.approx(
        [left, left + (right - left) * 0.375, left + (right - left) * 0.625, right], abs=0.1
    )


def test_bar_tooltips_have_the_rows() -> None:
    svg = histogram(Bars([0, 5], 5, [1, 2], 3, 9), "used", "lengths")
    assert titles(svg) == ["0 to 4 tokens\n1 row", "5 to 9 tokens\n2 rows"]
    assert titles(histogram(Bars([1], 1, [1000], 1, 1), "used", "x")) == ["1 token\n1,000 rows"]
