"""Renders facts about a job as a table on a terminal, or as plain lines elsewhere."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.text import Text

_MOST_COLUMNS = 110
_BAR_CELLS = 16
_STYLES = {"good": "green", "bad": "red", "": "bold"}


@dataclass(frozen=True)
class SummaryLine:
    """A fact with its label; untrusted text has passed through ``printable``."""

    label: str
    value: str
    note: str = ""
    """Rest of the line, including its comma or parenthesis."""
    share: float | None = None
    """Share from 0 to 1, which a terminal shows as a bar."""
    tone: str = ""
    """``good``, ``bad`` or ""."""

    @property
    def line(self) -> str:
        return f"{self.label:<9}{self.value}{self.note}"


def plain(facts: Iterable[SummaryLine]) -> Iterator[str]:
    return (fact.line for fact in facts)


def render_table(
    title: str, facts: Iterable[SummaryLine], lines: Iterable[str] | None = None
) -> str:
    """Return facts for stdout: a table if it is a terminal, else plain lines. Respects NO_COLOR.

    Args:
        title: a string that has passed through ``printable``.
        lines: plain lines to return instead of ``facts`` if stdout is not a terminal.
    """
    if not draws_tables(sys.stdout):
        return "\n".join(plain(facts) if lines is None else lines)
    from rich.console import Console

    width = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
    screen = Console(file=StringIO(), force_terminal=True, width=width, highlight=False)
    with screen.capture() as captured:
        screen.print(table_panel(title, facts))
    return captured.get().rstrip("\n")


def table_panel(title: str, facts: Iterable[SummaryLine]) -> Panel:
    """Return the table of ``render_table`` as a rich panel."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(max_width=46)
    table.add_column(style="dim")
    for fact in facts:
        table.add_row(Text(fact.label), _value(fact), Text(_without_joint(fact.note)))
    return Panel(
        table, title=Text(title, style="bold"), title_align="left", border_style="dim", expand=False
    )


def draws_tables(stream: TextIO | None) -> bool:
    """Return True if ``stream`` is a terminal that can move its cursor and show more than ASCII."""
    try:
        is_terminal = stream is not None and stream.isatty()
        encoding = getattr(stream, "encoding", None) or ""
    except ValueError:  # the stream is closed
        return False
    return is_terminal and os.environ.get("TERM") != "dumb" and "utf" in encoding.lower()


def _without_joint(note: str) -> str:
    """Remove the punctuation that joined a note to the text before it."""
    text = note.strip(",;: ")
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def _value(fact: SummaryLine) -> Text:
    from rich.text import Text

    value = (fact.value.removesuffix(":"), _STYLES[fact.tone])
    if fact.share is None:
        return Text.assemble(value)
    full = math.floor(_BAR_CELLS * min(max(fact.share, 0.0), 1.0))
    # The lighter line distinguishes the two parts without colors.
    bar = ("━" * full, "cyan"), ("─" * (_BAR_CELLS - full), "dim")
    return Text.assemble(*bar, " ", value)
