"""Progress of a job by rows and by tokens, and the time left.

A running row counts as a fraction of a row: its drawn tokens, divided by the number of tokens that
a row is expected to draw. The expected number is the tokens drawn so far, by running and finished
rows, divided by the number of finished rows: the maximum-likelihood estimate for censored lifetimes
(Epstein and Sobel, "Life testing", 1953). The mean of finished rows alone would be too
small while long answers run. Until a row is finished, each row is expected to draw its token limit,
and the time left is an upper bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from operator import add, attrgetter, sub
from typing import Any, Self

from batchinfer.console.format import counted, duration, whole_percent
from batchinfer.engine.stats import StepStats


@dataclass(slots=True)
class Counts:
    """Counts of a run or a worker. Objects are added, but never modified.

    The class is not frozen, because each step makes several objects, and making a frozen object
    takes four times as long.
    """

    rows: int = 0
    failed: int = 0
    reused: int = 0
    """Number of rows copied from other outputs; ``rows`` does not count them."""
    begun: int = 0
    ended: int = 0
    """Number of rows that were given to the engine and are finished."""
    most_tokens: int = 0
    """Upper bound on the output tokens of the rows given to the engine."""
    prompt_tokens: int = 0
    """Prompt tokens of the rows given to the engine."""
    tokens: int = 0
    kept_tokens: int = 0
    """Number of output tokens that earlier runs drew for the rows given to the engine."""
    settled_tokens: int = 0
    """Number of tokens in ``tokens`` and ``kept_tokens`` that do not belong to running rows."""
    prefill_tokens: int = 0
    """Number of prompt tokens computed, including tokens computed again."""
    preemptions: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(add, _values(self), _values(other)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*map(sub, _values(self), _values(other)))

    @classmethod
    def lost_with(cls, worker: Counts) -> Self:
        """Return the counts to add when a worker dies and others start its running rows again."""
        running = worker.begun - worker.ended
        return cls(
            begun=-running,
            most_tokens=-worker.most_tokens * running // max(1, worker.begun),
            prompt_tokens=-worker.prompt_tokens * running // max(1, worker.begun),
            settled_tokens=worker.tokens + worker.kept_tokens - worker.settled_tokens,
        )


_values = attrgetter(*(field.name for field in fields(Counts)))


class Meter:
    """Measures the progress of a run, and the use of its KV cache.

    Args:
        total: number of rows to run.
        before: number of rows that earlier runs have finished.
        draws: True if rows draw tokens; otherwise, the speed is in rows and input tokens.
    """

    def __init__(
        self,
        total: int,
        before: int = 0,
        *,
        draws: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self.before = before
        self.draws = draws
        self.counts = Counts()
        self.failed = 0
        """Number of failed rows; the thread that writes rows counts them."""
        self.reused = 0
        """Number of rows copied from other outputs; the thread that writes rows counts them."""
        self.step: StepStats | None = None
        self.note = ""
        """Text to show instead of the use of the KV cache."""
        self._clock = clock
        self._began = clock()
        self._most_done = 0.0

    def begin(self) -> None:
        """Start the clock; call this right before the first rows run."""
        self._began = self._clock()

    def add(self, added: Counts, step: StepStats | None) -> None:
        """Add the counts of a step; ``step`` is None if another process ran the step."""
        # If a task draws no tokens, the engine still draws and discards a token after each prompt.
        self.counts += added if self.draws else replace(added, tokens=0)
        if step is not None:
            self.step = step

    @property
    def elapsed_s(self) -> float:
        return max(self._clock() - self._began, 1e-9)

    @property
    def rows_finished(self) -> int:
        """Number of rows that this run has computed or copied."""
        return self.counts.rows + self.reused

    @property
    def rows_running(self) -> int:
        """Number of unfinished rows in the engine."""
        return max(0, self.counts.begun - self.counts.ended)

    @property
    def tokens_per_s(self) -> float:
        return self.counts.tokens / self.elapsed_s

    @property
    def rows_per_s(self) -> float:
        return self.counts.rows / self.elapsed_s

    @property
    def pool(self) -> float | None:
        """Used share of the KV blocks; None without a KV cache, or before the first step."""
        return None if self.step is None else self.step.pool_use

    @property
    def shared(self) -> float:
        """Share of the used blocks that several rows share."""
        return self.step.kv_blocks_shared / max(self.step.kv_blocks_used, 1) if self.step else 0.0

    @property
    def expects_most(self) -> bool:
        """True if rows are expected to draw their token limits, because no row is finished."""
        return self.counts.ended == 0

    @property
    def rows_done(self) -> float:
        """Number of finished rows, plus the finished shares of running rows."""
        if not self.draws:
            return min(float(self.total), max(self.rows_finished, self._rows_read))
        counts, expected = self.counts, self._expected_tokens
        drawn = max(0, counts.tokens + counts.kept_tokens - counts.settled_tokens)
        running = min(drawn / expected, self.rows_running) if expected else 0.0
        return min(float(self.total), self.rows_finished + running)

    @property
    def _rows_read(self) -> float:
        """Number of finished rows, estimated from computed tokens. An encoder runs long rows first,
        so counting rows would understate the progress."""
        counts = self.counts
        other = self.rows_finished - counts.ended  # rows that were refused or copied
        return other + counts.prefill_tokens * counts.begun / max(1, counts.prompt_tokens)

    @property
    def _expected_tokens(self) -> float:
        counts = self.counts
        most = counts.most_tokens / max(1, counts.begun)
        if self.expects_most:
            return most
        return min(most, (counts.tokens + counts.kept_tokens) / counts.ended)

    @property
    def rows_share(self) -> float:
        """Finished share of the job's rows, including earlier runs."""
        whole = self.before + self.total
        return (self.before + self.rows_finished) / whole if whole else 1.0

    @property
    def share(self) -> float:
        """Finished share of the work, including running rows and earlier runs; never decreases."""
        whole = self.before + self.total
        done = (self.before + self.rows_done) / whole if whole else 1.0
        self._most_done = max(self._most_done, done)
        return self._most_done

    @property
    def eta_s(self) -> float | None:
        """Seconds until all rows are finished; None before the first computed token."""
        expected = self._expected_tokens
        kept = self.counts.kept_tokens / expected if expected else 0.0
        computed = self.rows_done - self.reused - kept
        left = self.total - self.rows_done
        return self.elapsed_s * left / computed if computed > 0 else None

    @property
    def speeds(self) -> list[str]:
        """Reused rows, if any, then tokens per second, or rows and input tokens per second."""
        speeds = [f"{self.tokens_per_s:,.0f} tokens/s"]
        if not self.draws:
            computed = self.counts.prefill_tokens / self.elapsed_s
            speeds = [f"{self.rows_per_s:,.1f} rows/s", f"{computed:,.0f} input tokens/s"]
        return [f"{self.reused:,} rows reused", *speeds] if self.reused else speeds

    @property
    def rates(self) -> str:
        """Speeds and use of the KV cache, for the end of a progress bar or line."""
        pool = "" if self.pool is None else f"pool {self.pool:.0%}, shared {self.shared:.0%}"
        return ", ".join(filter(None, [*self.speeds, self.note or pool]))

    @property
    def rows_line(self) -> str:
        """Finished rows, such as ``1,235 of 5,000 rows``."""
        whole = self.before + self.total
        return f"{self.before + self.rows_finished:,} of {counted(whole, 'row')}"

    @property
    def running_line(self) -> str:
        """Unfinished rows, such as ``256 in the engine``; "" if there are none."""
        return f"{self.rows_running:,} in the engine" if self.rows_running else ""

    @property
    def line(self) -> str:
        rows = f"{self.rows_line} ({whole_percent(self.rows_share)})"
        failed = f"{self.failed:,} failed" if self.failed else ""
        work = f"{whole_percent(self.share)} of the work done" if self.rows_running else ""
        line = ", ".join(filter(None, [rows, failed, self.running_line, work, self.rates]))
        return line if self.eta_s is None else f"{line}, {self.left}"

    @property
    def left(self) -> str:
        """Time left, such as ``about 12.0 s left``, if ``eta_s`` is known."""
        assert self.eta_s is not None
        return f"{'at most' if self.expects_most else 'about'} {duration(self.eta_s)} left"

    def facts(self) -> dict[str, Any]:
        """Return the progress for machines: named values in rows, tokens and seconds."""
        return {
            "rows_total": self.before + self.total,
            "rows_finished": self.before + self.rows_finished,
            "rows_failed": self.failed,
            "rows_reused": self.reused,
            "rows_running": self.rows_running,
            "share": round(self.share, 6),
            "output_tokens": self.counts.tokens,
            "tokens_per_s": round(self.tokens_per_s, 3),
            "prefill_tokens": self.counts.prefill_tokens,
            "rows_per_s": round(self.rows_per_s, 3),
            "eta_s": None if self.eta_s is None else round(self.eta_s, 3),
            "eta_is_most": self.expects_most,
            "pool_use": None if self.pool is None else round(self.pool, 6),
        }
