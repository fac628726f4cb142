"""Shows the messages, the summary and the report of a run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from batchinfer.console.format import counted, counted_rows, duration, pool_blocks, printable
from batchinfer.console.phases import phase
from batchinfer.console.stdout import print_stdout
from batchinfer.console.table import SummaryLine, render_table
from batchinfer.console.text_view import Display
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.stats.first_errors import error_lines
from batchinfer.job.stats.live import WatchedRun
from batchinfer.job.stats.summary import kernels_differ
from batchinfer.job.storage.filesystem import read_file

Report = Callable[[OutputDir, Callable[[str], None]], bool]
"""Writes the report, and returns True if it was written; the second argument receives warnings."""
_MAX_DAMAGE_LINES = 5
_AGAIN = {
    False: "the same command again",
    True: "the same command without --overwrite and with output.if_exists: resume",
}


def summary_facts(
    summary: dict[str, Any], output: PurePath, *, reported: bool = False
) -> Iterator[SummaryLine]:
    """Return the lines of the table at the end of a job.

    Args:
        summary: the content of ``summary.json``.
        reported: True if the job has a report.
    """
    rows, tokens, kv = (summary[key] for key in ("rows", "tokens", "kv"))
    time_s, rates = summary["time_s"], summary["throughput"]
    yield SummaryLine(
        "rows",
        f"{rows['ok']:,} ok",
        f", {rows['error']:,} failed, in {duration(time_s['wall'])} "
        f"({duration(time_s['load'])} to load)",
        tone="bad" if rows["error"] and not rows["ok"] else "good",
    )
    yield from error_lines(rows["error_codes"], rows.get("first_errors", ()))
    if replaced := summary["input"]["replaced_cells"]:
        yield SummaryLine(
            "note",
            f"{counted(replaced, 'input cell')} had bytes that are not valid in input.encoding",
            ", read as U+FFFD",
        )
    if rows["control_text"]:
        yield SummaryLine(
            "note",
            "prompts contain control tokens, which are treated as plain text",
            f", in {counted_rows(rows['control_text'])}",
        )
    if rows["reused"]:
        yield SummaryLine("reused", counted_rows(rows["reused"]), ", not computed again")
    equal = summary["sharing"]["deduplicated_rows"]
    if equal:
        yield SummaryLine(
            "note", f"{counted_rows(equal)} copied from equal rows", ", not computed again"
        )
    memory = summary["out_of_memory"]
    if memory["count"]:
        yield SummaryLine(
            "note",
            f"out of memory in {memory['count']:,} steps",
            f"; max_num_batched_tokens was lowered to {memory['max_num_batched_tokens']:,}",
        )
    draws_none = tokens["prompt"] and not tokens["output"]
    if draws_none:
        each = f", {rates['total_tokens_per_s']:,.0f} per second; {rates['rows_per_s']:,.1f} rows/s"
        yield SummaryLine("tokens", f"{tokens['prompt']:,} in prompts", each)
    elif tokens["prompt"]:
        each = f", {rates['output_tokens_per_s']:,.0f} per second"
        yield SummaryLine("tokens", f"{tokens['output']:,} in answers", each)
    yield from _samples(summary["accept"])
    if kv["num_blocks"] and tokens["prompt"]:  # otherwise, nothing was computed
        workers = summary["workers"]
        each = f" on each of {workers:,} workers" if workers > 1 else ""
        mean, peak = kv["mean_utilization"], kv["peak_utilization"]
        yield SummaryLine(
            "pool",
            pool_blocks(kv["num_blocks"], kv["block_size"]),
            f"{each}; {mean:.1%} used on average, at most {peak:.1%}",
        )
        yield SummaryLine(
            "waste",
            f"{kv['mean_waste']:.1%} of the used blocks",
            ""
            if draws_none
            else f" (reserving the longest answers would waste {kv['contiguous_waste']:.1%})",
        )
        reused, planned = kv["prefix_hit_rate"], summary["sharing"]["planned_rate"]
        in_common = f" (rows share {planned:.1%})" if planned > reused else ""
        yield SummaryLine(
            "sharing",
            f"saved {kv['sharing_saving']:.1%} of the blocks",
            f"; {reused:.1%} of the prompt tokens were cached{in_common}",
        )
    made = f"data/, stats/, summary.json{', report.html' if reported else ''}"
    yield SummaryLine("files", f"{printable(str(output))}:", f" {made}")


def _samples(tally: Mapping[str, int]) -> Iterator[SummaryLine]:
    if not tally["samples_tried"]:
        return
    counts = [
        (tally["samples_rejected"], "did not pass"),
        (tally["samples_duplicate"], "repeated the text of a kept sample"),
        (tally["samples_surplus"], "were not needed"),
    ]
    yield SummaryLine(
        "samples",
        f"{tally['samples_accepted']:,} kept of {tally['samples_tried']:,} drawn",
        "".join(f"; {count:,} {what}" for count, what in counts if count),
    )


def too_many_errors(rows: dict[str, Any], max_error_rate: float, output: PurePath) -> str:
    codes = ", ".join(f"{code} {count:,}" for code, count in rows["error_codes"].items())
    return (
        f"{rows['error']:,} of {counted_rows(rows['total'])} failed, more than "
        f"errors.max_error_rate ({max_error_rate:g}) allows: {codes}\nall rows are "
        f"in {printable(str(output))}, with their errors in the column error, but "
        "there is no _SUCCESS; to run the failed rows again, use --retry-errors; "
        "to accept them, raise errors.max_error_rate (run-batch: --max-error-rate) "
        "and run again"
    )


@dataclass
class RunReporter:
    watched: WatchedRun
    """The progress of the run, for other displays."""
    display: Display
    as_json: bool = False
    """Print ``summary.json``, and nothing else, to stdout."""
    report: Report | None = None
    """Writes the report; None if the run writes no report."""
    _json_result: str | None = None

    def print_json(self) -> None:
        """Print the summary of a job that has ended, if the run has ``as_json``. Raise OSError if
        stdout cannot be written; the job's output is complete."""
        if self._json_result is not None:
            print_stdout(self._json_result)

    def nothing_to_do(self, out: OutputDir, reason: str, *, is_finished: bool) -> None:
        """Say why the run does nothing; ``print_json`` prints the summary of a finished job."""
        self.display.say("nothing_to_do", reason, is_result=True, output=str(out.root))
        if self.as_json and is_finished:
            self._json_result = read_file(out.files, out.summary).decode().rstrip("\n")

    def resumes(self, finished: int, total: int) -> None:
        if finished:
            line = f"{finished:,} of {counted_rows(total)} were already finished"
            self.display.say("resumed", line, rows_finished=finished, rows_total=total)

    def damage(self, damaged: Mapping[str, str]) -> None:
        """Name the damaged files, which the run writes again, and say what is wrong with them."""
        for name, problem in list(damaged.items())[:_MAX_DAMAGE_LINES]:
            line = f"rewriting {name}: {problem}"
            self.display.say("damaged_file", line, "warning", file=name, problem=problem)
        if len(damaged) > _MAX_DAMAGE_LINES:
            more = len(damaged) - _MAX_DAMAGE_LINES
            self.display.say("damaged_files", f"and {more:,} more files", "warning", files=more)

    def note(self, line: str) -> None:
        self.display.say("note", line)

    def reused_nothing(self, lines: Iterable[str]) -> None:
        """Say why no row could be reused, with one line for each output."""
        for line in lines:
            self.note(line)

    def other_kernels(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        for what in sorted(before.keys() & now.keys()):
            if before[what] != now[what]:
                line = kernels_differ(what, [before[what], now[what]])
                self.display.say("other_kernels", line, "warning")

    def stopped(self, out: OutputDir, *, overwrites: bool) -> None:
        """Say that the run was interrupted, and how to get a report.

        An interrupted run has no time to write a report itself.
        """
        self.display.say("stopped", f"stopped; to resume, run {_AGAIN[overwrites]}", "error")
        place = shlex.quote(printable(str(out.root)))
        self.display.say("see_report", f"batchinfer report {place} shows the job's progress")

    def parts_left(self, out: OutputDir, others_left: int) -> None:
        """Say that this process has written its parts, and that another process ends the job."""
        left = f"other processes still have {counted(others_left, 'part')} to make"
        if not others_left:
            left = "another process has finished the job"
        done = f"this process has made its parts in {printable(str(out.root))}; {left}"
        self.display.say("shard_ended", done, is_result=True, parts_left=others_left)

    def too_many_errors(self, out: OutputDir, rows: dict[str, Any], limit: float) -> None:
        line = too_many_errors(rows, limit, out.place)
        self.display.say("too_many_errors", line, "error", rows=rows, max_error_rate=limit)

    def too_few_rows(self, out: OutputDir, kept: int, least: int) -> None:
        line = (
            f"{counted_rows(kept)} succeeded, but errors.min_rows is "
            f"{least:,}\nall rows are in {printable(str(out.place))}, but there is "
            "no _SUCCESS; check whether input.filter or accept leaves too few "
            "rows, or lower errors.min_rows and run again"
        )
        self.display.say("too_few_rows", line, "error", rows=kept, min_rows=least)

    def end(self, out: OutputDir, summary: dict[str, Any], warnings: Sequence[str]) -> None:
        """Write the report and show the summary, once all parts are written."""
        self.watched.summary = summary
        lines = list(warnings)
        with phase("drawing the report"):
            reported = self.report is not None and self.report(out, lines.append)
        for line in lines:
            self.display.say("warning", line, "warning")
        if self.as_json:
            self._json_result = json.dumps(summary, indent=2, ensure_ascii=False)
        else:
            facts = summary_facts(summary, out.place, reported=reported)
            table = render_table("job ended", facts)
            self.display.say("job_ended", table, is_result=True, summary=summary)
