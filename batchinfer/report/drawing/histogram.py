"""Histograms: how many rows are how long."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from batchinfer.report.drawing.palette import light
from batchinfer.report.drawing.svg import COUNT_LABELS, Shape, axis, draw, sparse_axis


def histogram(
    starts: Sequence[int], width: int, counts: Sequence[int], colour: str, shape: Shape, label: str
) -> str:
    """SVG of a histogram of rows by tokens.

    Args:
        starts: the bars' lower bounds.
        width: of a bar, in tokens.
        counts: rows of each bar.
    """
    rows = [
        {"from": start, "to": start + width, "rows": count, "text": _text(start, width, count)}
        for start, count in zip(starts, counts, strict=True)
    ]
    chart = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_bar(color=light(colour), binSpacing=1)
        .encode(
            x=alt.X(
                "from:Q",
                bin="binned",
                title=None,
                axis=sparse_axis(tickCount=6, tickMinStep=1, labelExpr=COUNT_LABELS),
            ),
            x2="to:Q",
            y=alt.Y(
                "rows:Q",
                title=None,
                axis=axis(tickCount=4, tickMinStep=1, labelExpr=COUNT_LABELS),
            ),
        )
    )
    hover = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_rect(opacity=0, aria=True)
        .encode(x=alt.X("from:Q", bin="binned"), x2="to:Q", description="text:N")
    )
    return draw(chart + hover, shape, label)


def _text(start: int, width: int, count: int) -> str:
    last = start + width - 1
    tokens = (
        f"{start:,} token{'' if start == 1 else 's'}"
        if width == 1
        else f"{start:,} to {last:,} tokens"
    )
    return f"{tokens}; {count:,} {'row' if count == 1 else 'rows'}"
