"""SVG of a chart that altair describes, with the values under the pointer as SVG titles.

There is no text in it but numbers and words of this program: names that come from data stand in
the page around it.
"""

from __future__ import annotations

import re
from typing import Any

import altair as alt
import vl_convert

from batchinfer.report.drawing.palette import light
from batchinfer.report.drawing.paths import compact

Shape = tuple[int, int]
"""Width and height in units of the page's own: a chart is scaled to the place it gets."""
WIDE: Shape = (1090, 300)
NARROW: Shape = (440, 240)
COUNT_LABELS = "format(datum.value, datum.value < 1000 ? '~r' : '~s')"
"""Labels of what is counted; what it is stands above the chart."""
_FONT = "system-ui, sans-serif"
_PADDING = {"left": 20, "right": 10, "top": 6, "bottom": 8}
"""Room for labels that a phone's style sheet makes a sixth larger."""
_HOVER = re.compile(r'<path aria-label="([^"]*)"[^>]*? d="([^"]*)"[^>]*?/>')
_PATH = re.compile(r' d="([^"]*)"')
_NOISE = re.compile(
    r' (?:role="graphics-\w+"|aria-roledescription="[^"]*"|aria-hidden="true"|opacity="1"'
    r'|pointer-events="none"|font-family="[^"]*")|<path class="foreground"[^>]*/>'
)


def axis(**changes: Any) -> alt.Axis:
    """An axis in the page's style."""
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


def sparse_axis(**changes: Any) -> alt.Axis:
    """An axis below a chart: labels that would touch are left out."""
    spaced = {"labelFlush": False, "labelOverlap": True, "labelSeparation": 14, "labelPadding": 11}
    return axis(**spaced, **changes)


def hover_marks(spans: list[dict[str, Any]]) -> Any:
    """Areas over the whole height that cannot be seen, each with a text.

    Args:
        spans: ``from`` and ``to`` on the axis below, and ``text``, with a line for each value.
    """
    return (
        alt.Chart(alt.InlineData(values=spans))
        .mark_rect(opacity=0, aria=True)
        .encode(x="from:Q", x2="to:Q", description="text:N")
    )


def draw(chart: Any, shape: Shape, label: str) -> str:
    """SVG of a chart.

    Args:
        label: what it shows, for who cannot see it.
    """
    width, height = shape
    whole = (
        chart.properties(
            width=width, height=height, autosize=alt.AutoSizeParams(type="fit", contains="padding")
        )
        .configure(background="transparent", font=_FONT, padding=_PADDING, aria=False)
        .configure_view(stroke=None)
    )
    drawn: str = vl_convert.vegalite_to_svg(whole.to_dict())
    viewed = re.search(r'viewBox="([\d. -]+)"', drawn)
    assert viewed is not None
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{viewed[1]}" role="img"'
    drawn = re.sub(r"^<svg[^>]*>", "", drawn.strip(), count=1)
    drawn = _HOVER.sub(_titled, _PATH.sub(lambda path: f' d="{compact(path[1])}"', drawn))
    return f'{head} font-family="{_FONT}" aria-label="{label}">' + _NOISE.sub("", drawn)


def _titled(mark: re.Match[str]) -> str:
    title = mark[1].replace("; ", "\n")
    return f'<path d="{mark[2]}"><title>{title}</title></path>'
