"""The crash history in simulated jobs with long rows, whose runs die at random."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from batchinfer.job.claims.crashed_rows import MOST_FRUITLESS, CrashHistory
from batchinfer.job.tokens.in_flight import ALONE_S

TOKENS_PER_S = 20
FLUSH_EVERY_S = 4.0
LONGEST = 600
LEAST_S = ALONE_S + 1 / TOKENS_PER_S
"""Shortest lifetime of a run in seconds: ``ALONE_S`` after its first token."""


class DiedError(Exception):
    """Ends a simulated run."""


@dataclass
class Job:
    """A job with rows of these lengths; ``poison``: a row, and its token that kills a run."""

    lengths: list[int]
    poison: tuple[int, int] | None = None
    history: CrashHistory = field(default_factory=CrashHistory)
    kept: dict[int, int] = field(default_factory=dict)
    """Number of stored tokens of each row."""
    finished: set[int] = field(default_factory=set)
    deaths: int = 0

    @property
    def missing(self) -> set[int]:
        return {*range(len(self.lengths))} - self.finished

    def run(self, lives_s: float) -> bool:
        """Run the job in the phases of ``PartsToMake``; return True if it is finished."""
        self._left = int(lives_s * TOKENS_PER_S)
        self._finished_now: set[int] = set()
        self._kept_tokens = False
        suspects = [{*group} for group in self.history.groups]
        rest = self.missing.difference(self.history.given_up, *suspects)
        for phase in (*suspects, rest):
            try:
                self._run_phase(phase)
            except DiedError:
                self.deaths += 1
                after = self.history.after_death(
                    ["run"],
                    phase - self.finished,
                    self._finished_now,
                    kept_tokens=self._kept_tokens,
                )
                self.history = after.among(self.missing)
                return False
        return True

    def _run_phase(self, rows: set[int]) -> None:
        every = int((ALONE_S if len(rows) == 1 else FLUSH_EVERY_S) * TOKENS_PER_S)
        lengths, step = {row: self.kept.get(row, 0) for row in rows}, 0
        while running := {row for row in rows if lengths[row] < self.lengths[row]}:
            if not self._left or any((row, lengths[row]) == self.poison for row in running):
                raise DiedError
            self._left -= 1
            step += 1
            lengths |= {row: lengths[row] + 1 for row in running}
            if step % every == 0:
                self.kept |= lengths
                self._kept_tokens = True
                self._flush({row for row in rows if lengths[row] >= self.lengths[row]})
        self._flush(rows)

    def _flush(self, ended: set[int]) -> None:
        self._finished_now |= ended - self.finished
        self.finished |= ended


def random_job(random: Random, *, has_poison: bool) -> Job:
    lengths = [random.randint(5, LONGEST) for _ in range(random.choice([1, 2, 3, 8, 40]))]
    row = random.randrange(len(lengths))
    return Job(lengths, (row, random.randrange(lengths[row])) if has_poison else None)


@pytest.mark.parametrize("has_poison", [False, True])
def test_no_row_is_given_up_for_kills_from_outside(has_poison: bool) -> None:
    """In a job with a row that kills the process, only this row is given up."""
    for seed in range(60):
        random = Random(seed)
        job, most_s = random_job(random, has_poison=has_poison), random.choice([1.5, 4.0, 20.0])
        while not job.run(random.uniform(LEAST_S, most_s)):
            assert job.deaths < 2000
        assert job.history.given_up == ((job.poison[0],) if job.poison else ())


def test_crash_row_is_found_in_few_deaths() -> None:
    for seed in range(200):
        job = random_job(Random(seed), has_poison=True)
        while not job.run(lives_s=1e9):
            assert job.deaths <= MOST_FRUITLESS + 2 + 6 + 2
        assert job.history.given_up == (job.poison[0],)
