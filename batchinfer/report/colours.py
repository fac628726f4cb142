"""The colours of a report, by what they stand for: of charts, and of the page around them.

Charts are drawn in the light theme's colours, which makes them whole pictures by themselves. In the
dark theme the page's style sheet puts the dark ones in their place, by what they are.
"""

from __future__ import annotations

from collections.abc import Iterator

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
