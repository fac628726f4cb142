"""Many crash states of the commit protocol, for ``make faults``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from random import Random

from batchinfer.errors import JobError
from tests.faults.lossy_files import LossyFiles
from tests.faults.protocol import (
    FAILING,
    CrashState,
    Job,
    Scenario,
    check,
    crash_states,
    first_run,
    retry_run,
)


def states_of_a_job(
    files: type[LossyFiles], random: Random, per_change: int
) -> Iterator[tuple[CrashState, Scenario]]:
    """Crash states of a job, of going on after a crash, and of running its error rows again."""
    states = list(crash_states(Job(files(), random), first_run, per_change))
    yield from ((state, first_run) for state in states)
    for state in random.sample(states, min(2, len(states))):
        again = Job(state.files, random, kept=set(state.kept))
        # Without fsync there are states that no run gets on from: they are among those above.
        later: list[CrashState] = []
        with suppress(JobError):
            later = list(crash_states(again, first_run, per_change))
        yield from ((state, first_run) for state in later)
    failing = Job(files(), random, failing=set(FAILING))
    failing.run()
    for state in crash_states(failing, retry_run, per_change):
        yield state, retry_run


def count_violations(files: type[LossyFiles], num_states: int, seed: int) -> Counter[str]:
    """Go on from so many crash states.

    Returns:
        ``states`` tried, and how many were ``wrong``.
    """
    counts: Counter[str] = Counter()
    random = Random(seed)
    while True:
        states = list(states_of_a_job(files, random, per_change=3))
        random.shuffle(states)
        for state, scenario in states:
            if counts["states"] == num_states:
                return counts
            counts["states"] += 1
            counts["wrong"] += not _holds(state, scenario, random)


def _holds(state: CrashState, scenario: Scenario, random: Random) -> bool:
    try:
        check(state, scenario, random)
    except Exception:
        return False
    return True
