"""What a run says on the screen beside its progress, and the page it leaves to be looked at."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchinfer.job.ending import summary_facts
from batchinfer.job.messages import printable
from batchinfer.job.output import OutputDir
from batchinfer.job.progress import say
from batchinfer.job.screen import shown
from batchinfer.job.storage.filesystem import read_file

Report = Callable[[OutputDir, Callable[[str], None]], bool]
"""Writes the report; told where to say why there is none. Whether there is one now."""
_MAX_DAMAGE_LINES = 5
_AGAIN = {
    False: "the same command again",
    True: "again without --overwrite, and with output.if_exists: resume,",
}


@dataclass(frozen=True)
class Telling:
    """What is to be said."""

    quiet: bool = False
    """Nothing but why the job did not succeed."""
    as_json: bool = False
    """The summary as ``summary.json`` has it, and nothing else on stdout."""
    report: Report | None = None
    """None: there is to be no report."""

    def nothing_to_do(self, out: OutputDir) -> None:
        """The job is finished."""
        if not self.quiet:
            done = f"nothing to do: {printable(str(out.root))} is finished"
            say(done, to_stderr=self.as_json)
        if self.as_json:
            say(read_file(out.files, out.summary).decode().rstrip("\n"))

    def damage(self, damaged: Mapping[str, str]) -> None:
        """What is made again, and why."""
        if self.quiet:
            return
        for name, problem in list(damaged.items())[:_MAX_DAMAGE_LINES]:
            say(f"{name} is made again: {problem}", to_stderr=True)
        if len(damaged) > _MAX_DAMAGE_LINES:
            say(f"and {len(damaged) - _MAX_DAMAGE_LINES:,} more files", to_stderr=True)

    def stopped(self, out: OutputDir, *, overwrites: bool) -> None:
        """It was interrupted. The report is left to who wants it: there are seconds to end in."""
        say(f"stopped; run {_AGAIN[overwrites]} to go on", to_stderr=True)
        if not self.quiet:
            place = shlex.quote(printable(str(out.root)))
            say(f"batchinfer report {place} shows how far it came", to_stderr=True)

    def end(self, out: OutputDir, summary: dict[str, Any], warnings: Sequence[str]) -> None:
        """All parts are made: write the report, say what came of the job."""
        lines = list(warnings)
        reported = self.report is not None and self.report(out, lines.append)
        for line in () if self.quiet else lines:
            say(line, to_stderr=True)
        if self.as_json:
            say(json.dumps(summary, indent=2, ensure_ascii=False))
        elif not self.quiet:
            say(shown("job ended", summary_facts(summary, out.root, reported=reported)))
