"""What the user sees: a bar or a line now and then while a job runs, a few lines at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, Protocol

from tqdm import tqdm

from batchinfer.engine.stats import StepStats
from batchinfer.job.messages import printable
from batchinfer.job.screen import Fact

LINE_EVERY_S = 30.0
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rows [{elapsed}<{remaining}{postfix}]"


class Progress(Protocol):
    """Told what each step finished."""

    def update(self, rows: int, tokens: int, stats: StepStats | None) -> None:
        """Take the rows a step finished, the output tokens it made, and how it filled the pool."""
        ...

    def close(self) -> None:
        """Leave the screen in order."""
        ...


def make_progress(total: int, *, quiet: bool) -> Progress:
    """A bar on a terminal, lines elsewhere, nothing if ``quiet``; all to stderr.

    Args:
        total: rows to run.
        quiet: show nothing.
    """
    if quiet or sys.stderr is None:
        return _Silence()
    if sys.stderr.isatty():
        return _Bar(total)
    return Lines(total)


def say(text: str, *, to_stderr: bool = False) -> None:
    """Print a line; whoever closed the stream has read enough."""
    name = "stderr" if to_stderr else "stdout"
    try:
        print(text, file=getattr(sys, name), flush=True)
    except (OSError, ValueError):
        setattr(sys, name, None)  # Python flushes once more at exit; give it nothing to fail on


class _Silence:
    def update(self, rows: int, tokens: int, stats: StepStats | None) -> None:
        pass

    def close(self) -> None:
        pass


class Meter:
    """Rows and tokens so far, and the pool as it is.

    Args:
        total: rows to run.
        clock: seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.rows = 0
        self.tokens = 0
        self.pool = 0.0
        self.shared = 0.0
        self._clock = clock
        self._began = clock()

    def add(self, rows: int, tokens: int, stats: StepStats | None) -> None:
        """Take a step, as ``Progress.update`` does."""
        self.rows += rows
        self.tokens += tokens
        if stats is not None:
            self.pool = stats.kv_blocks_used / stats.kv_blocks_total
            self.shared = stats.kv_blocks_shared / max(stats.kv_blocks_used, 1)

    @property
    def elapsed_s(self) -> float:
        """Time since the beginning."""
        return max(self._clock() - self._began, 1e-9)

    @property
    def rates(self) -> str:
        """Speed and pool, for the end of a progress bar or line."""
        speed = f"{self.tokens / self.elapsed_s:,.0f} tokens/s"
        return f"{speed}, pool {self.pool:.0%}, shared {self.shared:.0%}"


class _Bar:
    def __init__(self, total: int) -> None:
        self._counter = Meter(total, time.monotonic)
        self._bar = tqdm(total=total, desc="batchinfer", bar_format=_BAR, dynamic_ncols=True)

    def update(self, rows: int, tokens: int, stats: StepStats | None) -> None:
        self._counter.add(rows, tokens, stats)
        self._bar.set_postfix_str(self._counter.rates, refresh=False)
        self._bar.update(rows)

    def close(self) -> None:
        self._bar.close()


class Lines:
    """A plain line every ``LINE_EVERY_S`` seconds.

    Args:
        total: rows to run.
        clock: seconds.
        write: takes a line.
    """

    def __init__(
        self,
        total: int,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = lambda line: say(line, to_stderr=True),
    ) -> None:
        self._counter = Meter(total, clock)
        self._write = write
        self._next_s = LINE_EVERY_S

    def update(self, rows: int, tokens: int, stats: StepStats | None) -> None:
        """See ``Progress``."""
        counter = self._counter
        counter.add(rows, tokens, stats)
        elapsed = counter.elapsed_s
        if elapsed >= self._next_s:
            self._next_s = elapsed + LINE_EVERY_S
            line = f"{counter.rows:,} of {_rows(counter.total)}, {counter.rates}"
            if counter.rows:
                left = elapsed / counter.rows * (counter.total - counter.rows)
                line += f", about {duration(left)} left"
            self._write(line)

    def close(self) -> None:
        """See ``Progress``."""


def summary_facts(
    summary: dict[str, Any], output: PurePath, *, reported: bool = False
) -> Iterator[Fact]:
    """The end of a job, from its ``summary.json``; ``reported``: whether it has a report."""
    rows, tokens, kv = (summary[key] for key in ("rows", "tokens", "kv"))
    time_s, rates = summary["time_s"], summary["throughput"]
    yield Fact(
        "rows",
        f"{rows['ok']:,} ok",
        f", {rows['error']:,} failed, in {duration(time_s['total'])} "
        f"({duration(time_s['load'])} to load)",
        tone="bad" if rows["error"] and not rows["ok"] else "good",
    )
    if rows["error_codes"]:
        yield Fact("errors", _counts(rows["error_codes"]), tone="bad")
    if rows["control_text"]:
        yield Fact("note", "control tokens as plain text", f", in {_rows(rows['control_text'])}")
    equal = summary["sharing"]["deduplicated_rows"]
    if equal:
        yield Fact("note", f"{_rows(equal)} equal to others", ", not computed again")
    memory = summary["out_of_memory"]
    if memory["count"]:
        yield Fact(
            "note",
            f"out of memory in {memory['count']:,} steps",
            f"; max_num_batched_tokens came down to {memory['max_num_batched_tokens']:,}",
        )
    if tokens["prompt"] and not tokens["output"]:
        each = f", {rates['total_tokens_per_s']:,.0f} per second"
        yield Fact("tokens", f"{tokens['prompt']:,} in prompts", each)
    else:
        each = f", {rates['output_tokens_per_s']:,.0f} per second"
        yield Fact("tokens", f"{tokens['output']:,} out", each)
    yield from _samples(summary["accept"])
    if kv["num_blocks"]:
        yield Fact(
            "pool",
            f"{kv['num_blocks']:,} blocks of {kv['block_size']} tokens",
            f", {kv['mean_utilization']:.1%} used on average, {kv['peak_utilization']:.1%} at most",
        )
        yield Fact(
            "waste",
            f"{kv['mean_waste']:.1%} of the used blocks",
            f" (reserving the longest answers would waste {kv['contiguous_waste']:.1%})",
        )
        yield Fact(
            "sharing",
            f"saved {kv['sharing_saving']:.1%} of the blocks",
            f"; {kv['prefix_hit_rate']:.1%} of the prompt tokens were there already, "
            f"of {summary['sharing']['planned_rate']:.1%} that rows have in common",
        )
    made = f"data/, stats/, summary.json{', report.html' if reported else ''}"
    yield Fact("files", f"{printable(str(output))}:", f" {made}")


def _samples(tally: Mapping[str, int]) -> Iterator[Fact]:
    """What became of the samples that ``accept`` judged."""
    if not tally["samples_tried"]:
        return
    others = [
        (tally["samples_rejected"], "did not pass"),
        (tally["samples_duplicate"], "had the text of one that was kept"),
        (tally["samples_surplus"], "were more than was asked for"),
    ]
    yield Fact(
        "samples",
        f"{tally['samples_accepted']:,} kept of {tally['samples_tried']:,} drawn",
        "".join(f"; {count:,} {what}" for count, what in others if count),
    )


def _counts(codes: dict[str, int]) -> str:
    return ", ".join(f"{code} {count:,}" for code, count in codes.items())


def too_many_errors(rows: dict[str, Any], max_error_rate: float, output: PurePath) -> str:
    """Why the job did not succeed, and what to do."""
    return (
        f"{rows['error']:,} of {_rows(rows['total'])} failed, more than errors.max_error_rate "
        f"{max_error_rate:g} allows: {_counts(rows['error_codes'])}\n"
        f"all rows are written to {printable(str(output))}; see their error column. There is no "
        "_SUCCESS; to run them again, use --retry-errors; to accept them, raise "
        "errors.max_error_rate and run again"
    )


def _rows(count: int) -> str:
    return f"{count:,} row" if count == 1 else f"{count:,} rows"


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
