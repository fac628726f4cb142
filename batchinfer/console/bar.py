"""A run's progress: on a terminal one line with a bar and what fits beside it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial

from tqdm.utils import disp_len

from batchinfer.console.format import duration, whole_percent
from batchinfer.console.meter import Meter
from batchinfer.console.progress import Lines, Metered, Progress, StallNotice, print_line
from batchinfer.console.terminal_line import (
    TerminalLine,
    columns,
    has_drawing_characters,
    styled,
)

_DRAW_EVERY_S = 0.1
_LEAST_CELLS, _MOST_CELLS = 8, 28


def make_progress(meter: Meter, *, quiet: bool) -> Progress:
    """Progress display: a bar on a terminal, lines elsewhere, nothing if ``quiet``; all to stderr.

    Args:
        meter: counts, and is shown.
    """
    if quiet or sys.stderr is None:
        return Metered(meter)
    say = partial(print_line, to_stderr=True)
    if sys.stderr.isatty():
        return StallNotice(Bar(meter), say)
    return StallNotice(Lines(meter), say)


class Bar(Metered):
    """Progress as a line of a terminal that is written anew."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(meter)
        self._line: TerminalLine | None = None
        self._drawn_s = -math.inf

    def _show_if_due(self) -> None:
        now = time.monotonic()
        if now - self._drawn_s >= _DRAW_EVERY_S:
            self._drawn_s = now
            self._draw()

    def _draw(self) -> None:
        if self._line is None:  # not before: a wait that has a name may have the line until then
            self._line = TerminalLine()
        self._line.show(bar_line(self._meter, columns()))

    def close(self) -> None:
        if self._line is not None:
            self._line.close(last_line(self._meter, columns()))


def bar_line(meter: Meter, width: int) -> str:
    """Progress now, in at most ``width`` columns: what matters least is left out first."""
    cells = max(_LEAST_CELLS, min(width // 6, _MOST_CELLS))
    line = f"{whole_percent(meter.share):>4} {draw_bar(meter.share, cells)}"
    return _filled(line, zip(_joints(), _texts(meter), strict=False), width)


def _filled(line: str, texts: Iterable[tuple[str, str]], width: int) -> str:
    """A line with as many texts, each after its joint, as fit."""
    for joint, text in texts:
        longer = f"{line}{joint}{text}"
        if disp_len(longer) > width:
            break
        line = longer
    return line


def last_line(meter: Meter, width: int) -> str:
    """Progress at the end of a run, of a job that may not be done; speeds where there is room."""
    is_done = meter.rows_finished == meter.total
    share = "" if is_done else f" ({whole_percent(meter.rows_share)})"
    mine = f", {meter.rows_finished:,} of them" if meter.before else ""
    failed = f", {styled(f'{meter.failed:,} failed', 'bad')}" if meter.failed else ""
    line = f"{meter.rows_line}{share}{mine} in {duration(meter.elapsed_s)}{failed}"
    return _filled(line, [(", ", speed) for speed in meter.speeds], width)


def draw_bar(share: float, cells: int) -> str:
    """A bar that can be read without colours: what is done is heavier than what is left."""
    full = math.floor(cells * min(max(share, 0.0), 1.0))
    done, left = ("━", "─") if has_drawing_characters() else ("#", ".")
    return styled(done * full, "bar") + styled(left * (cells - full), "dim")


def _joints() -> Iterator[str]:
    yield "  "
    yield " "
    while True:
        yield ", "


def _texts(meter: Meter) -> Iterator[str]:
    """What stands beside a bar, what matters most first."""
    yield meter.rows_line
    yield "finished"  # the share at the beginning is of the work, which is on running rows as well
    if meter.failed:
        yield styled(f"{meter.failed:,} failed", "bad")
    if meter.eta_s is not None:
        yield meter.left
    if meter.rows_running:
        yield meter.running_line
    yield from meter.rates.split(", ")
    yield f"{duration(meter.elapsed_s)} so far"
