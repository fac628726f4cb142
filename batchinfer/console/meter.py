"""How far a job is, by rows and by tokens, and how long it will take.

While all rows are in flight none is finished: then the tokens of those that run say how far they
are, against the tokens that a row is expected to draw. That is the mean that running and finished
rows allow for, tokens drawn / rows finished: the mean of the finished ones alone would be that of
the short answers, for as long as the long ones still run (it is the maximum-likelihood estimate for
lifetimes of which some are censored; Epstein and Sobel, "Life testing", 1953). Until a row is
finished it is the most that a row may draw, and the time left is an upper bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from operator import add, attrgetter, sub
from typing import Any, Self

from batchinfer.console.format import duration, whole_percent
from batchinfer.engine.stats import StepStats


@dataclass(slots=True)
class Counts:
    """What a run, or a worker of it, has done; they add up.

    None is ever changed, though they are not frozen: several are made in each step, and to make a
    frozen one takes four times as long.
    """

    rows: int = 0
    """Rows finished."""
    failed: int = 0
    """Of these, rows that ended in an error."""
    reused: int = 0
    """Rows copied from other outputs; none of ``rows``."""
    begun: int = 0
    """Rows given to the engine."""
    ended: int = 0
    """Of these, rows that are finished."""
    most_tokens: int = 0
    """Most tokens that rows given to the engine may draw."""
    prompt_tokens: int = 0
    """Prompt tokens of rows given to the engine."""
    tokens: int = 0
    """Output tokens drawn."""
    kept_tokens: int = 0
    """Output tokens that earlier runs drew, of rows given to the engine."""
    settled_tokens: int = 0
    """Of both, tokens that belong to no row that still runs."""
    prefill_tokens: int = 0
    """Tokens computed for prompts, and tokens computed again."""
    preemptions: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(add, _values(self), _values(other)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*map(sub, _values(self), _values(other)))

    @classmethod
    def lost_with(cls, worker: Counts) -> Self:
        """What to add when a worker is gone, whose running rows others will begin anew."""
        running = worker.begun - worker.ended
        return cls(
            begun=-running,
            most_tokens=-worker.most_tokens * running // max(1, worker.begun),
            prompt_tokens=-worker.prompt_tokens * running // max(1, worker.begun),
            settled_tokens=worker.tokens + worker.kept_tokens - worker.settled_tokens,
        )


_values = attrgetter(*(field.name for field in fields(Counts)))


class Meter:
    """Progress of a run, and the pool's use now.

    Args:
        total: rows to run.
        before: rows that earlier runs have finished.
        draws: whether rows draw tokens; else rows and their own tokens say how fast it is.
        clock: seconds.
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
        """Rows that ended in an error; counted where rows are written, not where they run."""
        self.reused = 0
        """Rows that were copied from other outputs; counted there too."""
        self.step: StepStats | None = None
        """The latest step of an engine here."""
        self.note = ""
        """Stands for the pool's use: of several engines, say."""
        self._clock = clock
        self._began = clock()
        self._most_done = 0.0

    def begin(self) -> None:
        """Have the time count from now: what came before was no work on rows."""
        self._began = self._clock()

    def add(self, added: Counts, step: StepStats | None) -> None:
        """Add what a step has done.

        Args:
            step: None: the step was not of an engine here.
        """
        # An engine draws a token after a prompt that is only read: nobody gets it.
        self.counts += added if self.draws else replace(added, tokens=0)
        if step is not None:
            self.step = step

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return max(self._clock() - self._began, 1e-9)

    @property
    def rows_finished(self) -> int:
        """Rows that this run has finished, by computing or by copying them."""
        return self.counts.rows + self.reused

    @property
    def rows_running(self) -> int:
        """Rows that the engine has, and has not finished."""
        return max(0, self.counts.begun - self.counts.ended)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.counts.tokens / self.elapsed_s

    @property
    def rows_per_s(self) -> float:
        """Rows computed per second."""
        return self.counts.rows / self.elapsed_s

    @property
    def pool(self) -> float | None:
        """Used share of the KV blocks; None where there is no pool, or no step yet."""
        return None if self.step is None else self.step.pool_use

    @property
    def shared(self) -> float:
        """Share of the used blocks that is shared."""
        return self.step.kv_blocks_shared / max(self.step.kv_blocks_used, 1) if self.step else 0.0

    @property
    def expects_most(self) -> bool:
        """Whether running rows are expected to draw the most that they may: none is finished."""
        return self.counts.ended == 0

    @property
    def rows_done(self) -> float:
        """Rows finished, and of those that run the share that is done, as a number of rows."""
        if not self.draws:
            return min(float(self.total), max(self.rows_finished, self._rows_read))
        counts, expected = self.counts, self._expected_tokens
        drawn = max(0, counts.tokens + counts.kept_tokens - counts.settled_tokens)
        running = min(drawn / expected, self.rows_running) if expected else 0.0
        return min(float(self.total), self.rows_finished + running)

    @property
    def _rows_read(self) -> float:
        """Rows by the tokens of theirs that were computed: an encoder takes long ones first."""
        counts = self.counts
        other = self.rows_finished - counts.ended  # refused, copied
        return other + counts.prefill_tokens * counts.begun / max(1, counts.prompt_tokens)

    @property
    def _expected_tokens(self) -> float:
        """Tokens that a row is expected to draw."""
        counts = self.counts
        most = counts.most_tokens / max(1, counts.begun)
        if self.expects_most:
            return most
        return min(most, (counts.tokens + counts.kept_tokens) / counts.ended)

    @property
    def rows_share(self) -> float:
        """Share of the job's rows that is finished, by earlier runs as well."""
        whole = self.before + self.total
        return (self.before + self.rows_finished) / whole if whole else 1.0

    @property
    def share(self) -> float:
        """Share of the job's work that is done, that on running rows and earlier runs included; it
        never falls."""
        whole = self.before + self.total
        done = (self.before + self.rows_done) / whole if whole else 1.0
        self._most_done = max(self._most_done, done)
        return self._most_done

    @property
    def eta_s(self) -> float | None:
        """Seconds until all rows are finished; None before anything is computed."""
        expected = self._expected_tokens
        kept = self.counts.kept_tokens / expected if expected else 0.0
        computed = self.rows_done - self.reused - kept
        left = self.total - self.rows_done
        return self.elapsed_s * left / computed if computed > 0 else None

    @property
    def speeds(self) -> list[str]:
        """Tokens per second, after the rows that cost none; rows where none are drawn."""
        speeds = [f"{self.tokens_per_s:,.0f} tokens/s"]
        if not self.draws:
            computed = self.counts.prefill_tokens / self.elapsed_s
            speeds = [f"{self.rows_per_s:,.1f} rows/s", f"{computed:,.0f} input tokens/s"]
        return [f"{self.reused:,} rows reused", *speeds] if self.reused else speeds

    @property
    def rates(self) -> str:
        """Speed and pool, for the end of a progress bar or line."""
        pool = "" if self.pool is None else f"pool {self.pool:.0%}, shared {self.shared:.0%}"
        return ", ".join(filter(None, [*self.speeds, self.note or pool]))

    @property
    def rows_line(self) -> str:
        """Rows finished of all, such as ``1,235 of 5,000 rows``."""
        whole = self.before + self.total
        return f"{self.before + self.rows_finished:,} of {whole:,} row{'' if whole == 1 else 's'}"

    @property
    def running_line(self) -> str:
        """Rows that run or wait to, such as ``256 in the engine``; "": there are none.

        What is done of them is in ``share``.
        """
        return f"{self.rows_running:,} in the engine" if self.rows_running else ""

    @property
    def line(self) -> str:
        """All of it on one line."""
        rows = f"{self.rows_line} ({whole_percent(self.rows_share)})"
        failed = f"{self.failed:,} failed" if self.failed else ""
        work = f"{whole_percent(self.share)} of the work done" if self.rows_running else ""
        line = ", ".join(filter(None, [rows, failed, self.running_line, work, self.rates]))
        return line if self.eta_s is None else f"{line}, {self.left}"

    @property
    def left(self) -> str:
        """How long it takes still, such as ``about 12.0 s left``; only where that is known."""
        assert self.eta_s is not None
        return f"{'at most' if self.expects_most else 'about'} {duration(self.eta_s)} left"

    def facts(self) -> dict[str, Any]:
        """All of it by name, for machines; seconds, tokens and rows."""
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
