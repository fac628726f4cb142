"""Facts about a job: a table on a terminal, plain lines elsewhere."""

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
    """A fact with its label. Texts of unknown content are ``printable`` already."""

    label: str
    value: str
    """What is to be seen first."""
    note: str = ""
    """How the line goes on, its comma or bracket included."""
    share: float | None = None
    """Drawn as a bar on a terminal; from 0 to 1."""
    tone: str = ""
    """``good``, ``bad`` or neither."""

    @property
    def line(self) -> str:
        """The fact as a plain line."""
        return f"{self.label:<9}{self.value}{self.note}"


def plain(facts: Iterable[SummaryLine]) -> Iterator[str]:
    """The facts as plain lines."""
    return (fact.line for fact in facts)


def render_table(
    title: str, facts: Iterable[SummaryLine], lines: Iterable[str] | None = None
) -> str:
    """Facts for stdout: a table if it is a terminal, else plain lines.

    ``NO_COLOR`` is respected.

    Args:
        title: what they are about; ``printable`` already.
        lines: the plain lines, where they say the same in another way.
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
    """The table of ``render_table``, to be drawn by rich."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(max_width=46)
    table.add_column(style="dim")
    for fact in facts:
        table.add_row(Text(fact.label), _value(fact), Text(_beside(fact.note)))
    return Panel(
        table, title=Text(title, style="bold"), title_align="left", border_style="dim", expand=False
    )


def draws_tables(stream: TextIO | None) -> bool:
    """Whether ``stream`` is a terminal that moves its cursor and has more than ASCII."""
    try:
        is_terminal = stream is not None and stream.isatty()
        encoding = getattr(stream, "encoding", None) or ""
    except ValueError:  # it is closed
        return False
    return is_terminal and os.environ.get("TERM") != "dumb" and "utf" in encoding.lower()


def _beside(note: str) -> str:
    """A note for a column of its own: without what joined it to the text before."""
    text = note.strip(",;: ")
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def _value(fact: SummaryLine) -> Text:
    from rich.text import Text

    value = (fact.value.removesuffix(":"), _STYLES[fact.tone])
    if fact.share is None:
        return Text.assemble(value)
    full = math.floor(_BAR_CELLS * min(max(fact.share, 0.0), 1.0))
    empty = _BAR_CELLS - full  # a lighter line: without colours it is to be told from the other
    return Text.assemble(("━" * full, "cyan"), ("─" * empty, "dim"), " ", value)
