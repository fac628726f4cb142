"""Limits how many interrupted rows a run resumes at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from batchinfer.engine.stats import StepStats
from batchinfer.requests.requests import PromptRow

_SHARE_OF_LIFE = 0.95
"""A run resumes only rows that should finish within this share of the age at which the run before
it was killed. The value was chosen in simulations of a job that is killed every 9 to 25 seconds."""
_OUTLIVES = 1.25
"""A run whose age reaches this multiple of the killed run's recorded life no longer expects to be
killed. The value is over 1, because the killed run lived on after it wrote its last file."""
_FIXED_SHARE = 0.25
"""Assumed share of a step's time that does not depend on the number of sequences. The assumption
matters until steps with different numbers of sequences have been measured."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Sums over decode steps, from which a least-squares fit estimates the time of a step."""

    count: float = 0.0
    sequences: float = 0.0
    seconds: float = 0.0
    squared_sequences: float = 0.0
    sequences_seconds: float = 0.0
    prefill_tokens: float = 0.0
    """Number of prompt tokens and recomputed tokens in steps that were not only decode steps."""
    prefill_seconds: float = 0.0
    """Seconds that the steps of ``prefill_tokens`` took, minus the expected time of decode steps.
    """

    def plus(self, stats: StepStats) -> StepTimes:
        sequences, seconds = stats.num_running, stats.step_ms / 1000
        if stats.prefill_tokens:
            prefilled_s = max(seconds - self.expected_s(sequences), 0.0)
            return replace(
                self,
                prefill_tokens=self.prefill_tokens + stats.prefill_tokens,
                prefill_seconds=self.prefill_seconds + prefilled_s,
            )
        return replace(
            self,
            count=self.count + 1,
            sequences=self.sequences + sequences,
            seconds=self.seconds + seconds,
            squared_sequences=self.squared_sequences + sequences**2,
            sequences_seconds=self.sequences_seconds + sequences * seconds,
        )

    @property
    def s_per_prefill_token(self) -> float:
        """Seconds that a step takes per prompt token."""
        return self.prefill_seconds / max(self.prefill_tokens, 1)

    def expected_s(self, sequences: int) -> float:
        """Return the expected seconds of a step, linear in the number of sequences; 0 if no step
        was measured."""
        if not self.count:
            return 0.0
        # Add an invented step without sequences, which decides the slope if all steps are alike.
        count = self.count + 1
        seconds = self.seconds * (1 + _FIXED_SHARE / self.count)
        spread = self.squared_sequences - self.sequences**2 / count
        covariance = self.sequences_seconds - self.sequences * seconds / count
        slope = max(covariance, 0.0) / spread if spread else 0.0
        return seconds / count + slope * (sequences - self.sequences / count)


@dataclass(frozen=True, slots=True)
class RunPace:
    """How long a run lasted, and how long steps took in this run and the runs before it."""

    life_s: float
    """Seconds from the start of a run until it was killed; 0 for a run that ended normally."""
    steps: StepTimes


class ResumePace:
    """Chooses the order and the pace in which a run resumes the rows of a killed run.

    A run must compute the prompt and the kept tokens of a row again before it can draw the row's
    next token. If runs are killed soon after each other, and each run first resumes all rows, this
    recomputation takes most of the time between two kills. Rows with the fewest tokens left
    therefore come first, and a run resumes only rows that it can expect to finish before it is
    killed too. New rows wait. Once the run has outlived the killed run, it resumes all rows.

    Args:
        num_kept: returns the number of kept tokens of a row; 0 for a new row.
    """

    def __init__(self, num_kept: Callable[[int], int], clock: Callable[[], float]) -> None:
        self._num_kept = num_kept
        self._clock = clock
        self._began = clock()
        self._life_s = 0.0
        """Seconds that the killed run lived."""
        self._steps = StepTimes()
        self._tokens_due = 0
        """Tokens of resumed rows that steps have yet to compute again."""
        self._drawn_by_finished = 0
        self._limit_of_finished = 0
        """Largest number of tokens that the finished rows could have drawn."""

    @property
    def age_s(self) -> float:
        return self._clock() - self._began

    def pace(self, *, is_ending: bool) -> RunPace:
        """Return the age and step times of this run, for the next run; ``is_ending`` is True if
        this run ends without being killed."""
        return RunPace(0.0 if is_ending else self.age_s, self._steps)

    def follow(self, killed: RunPace) -> None:
        """Assume that this run will be killed at about the same age as the run before it."""
        self._life_s, self._steps = killed.life_s, killed.steps

    def stepped(self, stats: StepStats) -> None:
        self._steps = self._steps.plus(stats)
        self._tokens_due = max(0, self._tokens_due - stats.prefill_tokens)

    def finished(self, num_drawn: int, limit: int) -> None:
        """Count a finished row that drew ``num_drawn`` of at most ``limit`` tokens."""
        self._drawn_by_finished += num_drawn
        self._limit_of_finished += limit

    def ordered(self, rows: list[PromptRow]) -> list[PromptRow]:
        """Return the rows of a window: first the interrupted rows, sorted by the number of tokens
        left, then the new rows. Rows that share an answer stay together."""
        left = {row.row_id: left for row in rows if (left := self._most_left(row))}
        if not left:
            return rows
        of_key = {row.key: left[row.row_id] for row in rows if row.key and row.row_id in left}

        def order(row: PromptRow) -> tuple[float, bytes, bool]:
            key = row.key or b""
            first = left.get(row.row_id, of_key.get(key, math.inf))
            return first, key if first < math.inf else b"", row.row_id not in left

        return sorted(rows, key=order)

    def num_ready(self, rows: Iterable[PromptRow], num_running: int) -> int:
        """Return how many rows, counted from the first, may run now; the caller must run them."""
        count, age_s = 0, self.age_s
        is_young = age_s < _OUTLIVES * self._life_s
        end_s = _SHARE_OF_LIFE * self._life_s if is_young else math.inf
        for row in rows:
            num_running += 1 if row.sampling is None else row.sampling.params.n
            if left := self._most_left(row):
                due = self._tokens_due + row.num_prompt_tokens + self._num_kept(row.row_id)
                drawing_s = left * self._used_share * self._steps.expected_s(num_running)
                if age_s + due * self._steps.s_per_prefill_token + drawing_s > end_s:
                    break
                self._tokens_due = due
            count += 1
        return count

    @property
    def _used_share(self) -> float:
        """Share of the allowed tokens that finished rows have drawn."""
        limit = self._limit_of_finished
        return self._drawn_by_finished / limit if limit else 1.0

    def _most_left(self, row: PromptRow) -> float:
        """Return the largest number of tokens that a sample of an interrupted row may still draw;
        0 for a new row."""
        kept = self._num_kept(row.row_id)
        if not kept or row.sampling is None:
            return 0
        params = row.sampling.params
        return max(1.0, params.max_tokens - kept / (params.beam_width or params.n))
