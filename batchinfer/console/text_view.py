"""Shows a run to people as text; ``json_log`` shows it to machines as JSON objects."""

from __future__ import annotations

from typing import Literal

from batchinfer.console.meter import Meter
from batchinfer.console.phases import PhaseView, make_phase_view
from batchinfer.console.progress_bar import Progress, make_progress
from batchinfer.console.terminal import print_line

Level = Literal["info", "warning", "error"]


class Display:
    """Writes text to stderr, with a progress bar on a terminal, and the result to stdout.

    Args:
        result_on_stdout: True if people read stdout, so that the result is written there as text.
    """

    def __init__(self, *, quiet: bool = False, result_on_stdout: bool = True) -> None:
        self._quiet = quiet
        self._result_on_stdout = result_on_stdout
        self.phases: PhaseView | None = make_phase_view(quiet=quiet)
        """Shows phases; None if phases are not shown."""

    def progress(self, meter: Meter) -> Progress:
        return make_progress(meter, quiet=self._quiet)

    def say(
        self,
        event: str,
        text: str,
        level: Level = "info",
        *,
        is_result: bool = False,
        **fields: object,
    ) -> None:
        """Report an event of the run.

        Args:
            event: name of the event, for machines.
            text: the event in words, for people; must have passed through ``printable``.
            is_result: True if the text is a result, to be written to stdout if people read stdout.
            fields: facts for machines, as JSON data.
        """
        if level == "error" or not self._quiet:
            self._write(event, text, level, is_result, fields)

    def _write(
        self, event: str, text: str, level: Level, is_result: bool, fields: dict[str, object]
    ) -> None:
        print_line(text, to_stderr=not (is_result and self._result_on_stdout))
