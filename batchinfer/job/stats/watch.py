"""``batchinfer status --watch``: a job's status again and again, until the job ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from threading import Event

from batchinfer.console.format import printable
from batchinfer.console.progress import print_line
from batchinfer.console.table import draws_tables, table_panel
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.stats.status import Status, read_status
from batchinfer.process.process import stop_signals


def watch(out: OutputDir, every_s: float) -> None:
    """Show the status until the job is not running any more, or this is interrupted.

    On a terminal it is a screen that is drawn anew, elsewhere a line each time.

    Raises:
        DataError: there is no job's output, or its plan is damaged.
    """

    def look() -> Status:
        return read_status(out, time.time())

    with stop_signals() as stop:
        if draws_tables(sys.stdout):
            _draw(look, f"status of {printable(str(out.root))}", every_s, stop)
        else:
            _follow(look, lambda status: print_line(status.line()), every_s, stop)


def _draw(look: Callable[[], Status], title: str, every_s: float, stop: Event) -> None:
    from rich.console import Console
    from rich.live import Live

    screen = Console(file=sys.stdout, highlight=False)
    with Live(console=screen, auto_refresh=False) as live:
        _follow(
            look,
            lambda status: live.update(table_panel(title, status.facts()), refresh=True),
            every_s,
            stop,
        )


def _follow(
    look: Callable[[], Status], show: Callable[[Status], None], every_s: float, stop: Event
) -> None:
    while True:
        status = look()
        show(status)
        if status.state != "running" or stop.wait(every_s):
            return
