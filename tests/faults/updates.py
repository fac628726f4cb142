"""Updates over files that may lose, tear and reorder what was not synced."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from batchinfer.errors import DataError
from batchinfer.job.claims.swap_generation import finish_swap, put_in_place
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.manifest_file import stored_manifest
from tests.faults.lossy_files import LossyFiles
from tests.faults.protocol import OUT, PLAN, CrashState, Job, check, crash_states
from tests.faults.violation import ViolationError

NEXT_PLAN = replace(PLAN, fingerprint="g", rows_per_part=3)


def update_run(job: Job) -> None:
    """Make the next generation, or go on with it, and put it in place."""
    present = OutputDir(OUT, job.files)
    finish_swap(present)
    job.plan, job.out = NEXT_PLAN, present
    if stored_manifest(present).fingerprint == NEXT_PLAN.fingerprint:
        job.run()  # nothing is left to do
        return
    job.out = present.generation(NEXT_PLAN.name)
    job.run()
    put_in_place(present, job.out)
    job.out = present


def states_of_an_update(
    files: type[LossyFiles], random: Random, per_change: int
) -> list[CrashState]:
    """Crash states of updating a finished job."""
    job = Job(files(), random)
    job.run()
    job.kept = set()
    return list(crash_states(job, update_run, per_change))


def count_update_violations(files: type[LossyFiles], num_states: int, seed: int) -> Counter[str]:
    """Go on from so many crash states of updates.

    Returns:
        ``states`` tried, and how many were ``wrong``.
    """
    counts: Counter[str] = Counter()
    random = Random(seed)
    while counts["states"] < num_states:
        states = states_of_an_update(files, random, per_change=3)
        random.shuffle(states)
        for state in states[: num_states - counts["states"]]:
            counts["states"] += 1
            counts["wrong"] += not _holds(state, random)
    return counts


def _holds(state: CrashState, random: Random) -> bool:
    try:
        check_update(state, random)
    except Exception:
        return False
    return True


def check_update(state: CrashState, random: Random) -> None:
    """Check what readers find after a crash, then go on to the end.

    Raises:
        ViolationError: neither generation is whole, and nothing says so; or the end is wrong.
    """
    found = OutputDir(OUT, state.files)
    if found.files.stat(found.swap) is None:
        _check_one_generation(state.files, random)
    check(state, update_run, random)
    if state.files.entries(found.next) or found.files.stat(found.swap) is not None:
        raise ViolationError("the update has left something")


def _check_one_generation(files: LossyFiles, random: Random) -> None:
    job = Job(files, random)
    try:
        stored = stored_manifest(job.out)
    except DataError as error:
        raise ViolationError(str(error)) from None
    job.plan = NEXT_PLAN if stored.fingerprint == NEXT_PLAN.fingerprint else PLAN
    job.check_parts()  # segments that had gone may be back, and go with the next run
    if files.stat(job.out.success) is None:
        raise ViolationError("the generation that is there has no _SUCCESS")
