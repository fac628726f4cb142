"""What ``make faults`` runs, stage by stage: each a row of its table."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random

from batchinfer.errors import ExitCode
from tests.families import FAMILIES
from tests.faults import fuzz_families, fuzz_jobs, fuzz_models, fuzz_parquet, hostile_texts
from tests.faults.children import Pace
from tests.faults.fleet_kills import Killed, drivers_killed, workers_killed
from tests.faults.fuzz import MOST_S, Case, run_cases
from tests.faults.jobs import tiny_job
from tests.faults.kills import Killer
from tests.faults.long_answers import LongKiller, long_job
from tests.faults.lossy_files import LossyFiles, NeverSynced
from tests.faults.mended_model import retry_on_a_mended_model
from tests.faults.outputs import InBucket
from tests.faults.quick import POISON, echo_job
from tests.faults.random_edits import update_at_random
from tests.faults.states import count_violations
from tests.faults.update_kills import UpdateKiller
from tests.faults.updates import count_update_violations
from tests.job.fakes import FakeBuild
from tests.job.stores import environment, s3_server

Row = tuple[str, str, str]
"""What was done, what was found, and ``ok`` or a word in capitals."""
STATES_AT_ONCE = 1000
MOST_AGAIN_S = 10.0
MOST_TOKENS_AGAIN_S = 5.0
MOST_AGAIN_IN_FLEETS_S = 5.0
MOST_TO_STOP_S = 5.0
_MOST_SHOWN = 5


def random_kills(folder: Path, kills: int, seed: int) -> Row:
    killer = Killer(
        folder, tiny_job(folder, num_rows=2000, rows_per_part=100), None, Pace(1.0, 4096)
    )
    killer.run_unbroken()
    killer.kill_at_random(kills, Random(seed))
    found = killer.outcome
    worst = max(found.again)
    return (
        f"{found.kills} kills at random times, {found.jobs} jobs of 2,000 rows",
        "0 lost, 0 duplicated, 0 out of order, text as unbroken; of finished rows at most "
        f"{worst:.1f} s again, {found.rows_again / found.kills:.0f} rows a kill",
        "ok" if worst <= MOST_AGAIN_S else "TOO MUCH AGAIN",
    )


def long_answers(
    folder: Path, kills: int, seed: int, every_s: float, *, searches: bool = False
) -> Row:
    """Killed some seconds after a first flush, or just before it."""
    spec = long_job(folder, num_rows=16 if searches else 64, searches=searches)
    killer = LongKiller(folder, spec, None, Pace(every_s, 4096))
    killer.run_unbroken()
    killer.kill_again_and_again(kills, Random(seed), 1.5 + every_s, 5.0 + 2 * every_s)
    again, drawn, seconds = killer.again, killer.again.num_drawn, killer.again.seconds_drawn
    worst = max(again.seconds)
    return (
        f"{killer.outcome.kills} kills ({again.of_suspects} with suspects) in "
        f"{killer.outcome.jobs} jobs of long "
        + ("searches" if searches else "answers")
        + f", flushed every {every_s:g} s",
        f"bytes of an unbroken run; {sum(again.tokens) / len(again.tokens):,.0f} tokens again a "
        f"kill, at most {max(again.tokens):,}, of at most {worst:.1f} s; of {drawn / seconds:,.0f} "
        f"tokens a second {sum(again.bytes_written) / seconds / 1000:,.0f} kB/s are written, at "
        f"most {again.most_bytes / 1e6:.1f} MB are there",
        "ok" if worst <= MOST_TOKENS_AGAIN_S else "TOO MUCH AGAIN",
    )


def fleet_workers(folder: Path, kills: int, seed: int) -> Row:
    return _fleet_kills("workers of fleets", workers_killed(folder, kills, seed))


def fleet_drivers(folder: Path, kills: int, seed: int) -> Row:
    killed = drivers_killed(folder, kills, seed)
    return _fleet_kills(f"workers, in {kills} kills of their drivers,", killed)


def _fleet_kills(what: str, killed: Killed) -> Row:
    worst, kills = max(killed.again), len(killed.again)
    return (
        f"{kills} {what} killed, {killed.jobs} jobs of 2,000 rows",
        "0 lost, 0 duplicated, 0 out of order, bytes of one process, verify 0; of finished rows at "
        f"most {worst:.1f} s again, {killed.rows_again / kills:.0f} rows a kill",
        "ok" if worst <= MOST_AGAIN_IN_FLEETS_S else "TOO MUCH AGAIN",
    )


def named_kills(folder: Path, most: int, seed: int) -> Row:
    killer = _small_job(folder)
    random = Random(seed)
    points = list(killer.named_points())[:most]
    for point in points:
        killer.kill_at(point, random)
    return (
        f"{len(points)} kills at named points, each with one more while going on",
        f"{killer.outcome.jobs} jobs as unbroken, {killer.outcome.kills} kills in all",
        "ok",
    )


def stops(folder: Path, times: int, seed: int) -> Row:
    killer = _small_job(folder)
    waited = killer.stop_at_random(times, Random(seed))
    return (
        f"{times} SIGTERMs at random times",
        f"exit 75 each, at most {max(waited):.2f} s later; each went on to the unbroken output",
        "ok" if max(waited) <= MOST_TO_STOP_S else "TOO SLOW",
    )


def races(folder: Path, times: int) -> Row:
    killer = _small_job(folder)
    found = Counter(tuple(killer.race()) for _ in range(times))
    one_wins = (int(ExitCode.OK), int(ExitCode.LOCKED))
    return (
        f"{times} races of two runs for one output",
        ", ".join(f"exits {codes}: {count}" for codes, count in found.items()),
        _word(found == {one_wins: times}),
    )


def kills_in_a_store(folder: Path, kills: int, seed: int) -> Row:
    """Output in an object store: kills at random times, at named points, by a row; two at once."""
    with s3_server() as address:
        os.environ.update(environment(address))
        build, output = FakeBuild(max_num_seqs=8), InBucket(address)
        killer = Killer(folder, echo_job(folder), build, Pace(1e9, 4), output)
        killer.run_unbroken()
        random = Random(seed)
        killer.kill_at_random(kills, random)
        points = [point for point in killer.named_points() if point.endswith(":1")]
        for point in random.sample(points, min(kills, len(points))):
            killer.kill_at(point, random)
        found = Counter(tuple(killer.race()) for _ in range(max(1, kills // 5)))
        code = killer.run_until_done(f"row-{POISON}:1", most=20)
        given_up = [row["row_id"] for row in killer.rows() if row["error"]]
    one_wins = {(int(ExitCode.OK), int(ExitCode.LOCKED)): max(1, kills // 5)}
    right = found == one_wins and given_up == [POISON] and code == ExitCode.TOO_MANY_ROW_ERRORS
    return (
        f"{killer.outcome.kills} kills with output in a store, {killer.outcome.jobs} jobs",
        "0 lost, 0 duplicated, 0 out of order, text as unbroken; races end in "
        f"{', '.join(map(str, found))}; rows given up: {given_up}, exit {code}",
        _word(right),
    )


def retries(folder: Path, times: int) -> Row:
    codes = retry_on_a_mended_model(folder, times)
    return (
        f"a broken model run {times} times and retried; then mended, run, and retried",
        f"exits {', '.join(map(str, codes))}; the output in the end as unbroken",
        _word(codes == [int(ExitCode.TOO_MANY_ROW_ERRORS)] * (times + 2) + [0]),
    )


def fuzzed_job_files(folder: Path, count: int, seed: int, jobs: int) -> Row:
    return _fuzzed(f"{count:,} fuzzed job files", fuzz_jobs.case, folder, count, seed, jobs)


def fuzzed_parquet_files(folder: Path, count: int, seed: int, jobs: int) -> Row:
    return _fuzzed(f"{count:,} fuzzed Parquet files", fuzz_parquet.case, folder, count, seed, jobs)


def hostile_prompts(folder: Path, count: int, seed: int, jobs: int) -> Row:
    """Templates and tokenizers that are too much: a row's error, in time and in memory."""
    return _fuzzed(
        f"{count} hostile templates and tokenizers, each stopped by SIGTERM in a second job",
        hostile_texts.case,
        folder,
        count,
        seed,
        jobs,
        hostile_texts.MOST_S,
    )


def broken_model_folders(folder: Path, count: int, seed: int, jobs: int) -> Row:
    most_s = fuzz_models.MOST_S
    return _fuzzed(
        f"{count:,} broken model folders", fuzz_models.case, folder, count, seed, jobs, most_s
    )


def random_models(folder: Path, count: int, seed: int, jobs: int) -> Row:
    what = f"{count:,} random models of {min(count, len(FAMILIES))} families"
    return _fuzzed(what, fuzz_families.case, folder, count, seed, jobs, fuzz_families.MOST_S)


def crash_states(states: int, seed: int, jobs: int) -> Row:
    counts = _count(partial(count_violations, LossyFiles), states, seed, jobs)
    right = counts["wrong"] == 0 and counts["states"] == states
    return f"{counts['states']:,} crash states", f"{counts['wrong']} violations", _word(right)


def crash_states_without_sync(states: int, seed: int, jobs: int) -> Row:
    counts = _count(partial(count_violations, NeverSynced), states, seed, jobs)
    what = f"{counts['states']:,} crash states without fsync"
    return what, f"{counts['wrong']:,} violations seen", _word(counts["wrong"] > 0)


def _small_job(folder: Path) -> Killer:
    """A job of 300 rows that writes little and often, run once."""
    killer = Killer(folder, tiny_job(folder, num_rows=300, rows_per_part=50), None, Pace(1e9, 20))
    killer.run_unbroken()
    return killer


def _fuzzed(
    what: str, case: Case, folder: Path, count: int, seed: int, jobs: int, most_s: float = MOST_S
) -> Row:
    found = run_cases(case, count, seed, folder, jobs, most_s)
    for violation in found.violations[:_MOST_SHOWN]:
        print(violation)
    words: Counter[str] = Counter()
    for word, times in found.words.items():
        words[word.rpartition(": ")[2]] += times
    tally = ", ".join(f"{times:,} {word}" for word, times in words.most_common())
    wrong = len(found.violations)
    found_all = f"{tally}; {wrong} tracebacks, hangs, crashes, poor messages or wrong rows"
    return what, found_all, _word(not wrong)


def crash_states_of_updates(states: int, seed: int, jobs: int) -> Row:
    counts = _count(partial(count_update_violations, LossyFiles), states, seed, jobs)
    right = counts["wrong"] == 0 and counts["states"] == states
    what = f"{counts['states']:,} crash states of updates"
    return what, f"{counts['wrong']} violations; one generation whole, or said", _word(right)


def random_edits(folder: Path, times: int, seed: int) -> Row:
    kept = 0
    for at in range(times):
        place = folder / str(at)
        kept += update_at_random(place, Random(seed + at), rounds=6)
        shutil.rmtree(place)
    return (
        f"{6 * times:,} updates after random edits",
        f"data as a fresh output's; {kept:,} rows taken over, none run but those whose key is new",
        "ok",
    )


def kills_of_updates(folder: Path, most: int, seed: int) -> Row:
    killer = UpdateKiller(folder)
    points, random = killer.points(), Random(seed)
    for point in random.sample(points, min(most, len(points))):
        killer.kill_at(point, random)
    return (
        f"updates killed at {min(most, len(points))} of {len(points)} named points",
        f"{killer.kills} kills; one generation whole or said, then as a fresh output",
        "ok",
    )


def _count(
    count: Callable[[int, int], Counter[str]], states: int, seed: int, jobs: int
) -> Counter[str]:
    """Counts of so many crash states, some at a time.

    Args:
        count: takes a number of states and a seed.
    """
    sizes = [STATES_AT_ONCE] * (states // STATES_AT_ONCE) + [states % STATES_AT_ONCE]
    seeds = range(seed, seed + len(sizes))
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        found = pool.map(count, sizes, seeds)
        return sum(found, Counter())


def _word(right: bool) -> str:
    return "ok" if right else "WRONG"
