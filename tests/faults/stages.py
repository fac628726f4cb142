"""The stages of ``make faults``; each yields rows of its table."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from random import Random

from batchinfer.errors import ExitCode
from tests.families import FAMILIES
from tests.faults import (
    fuzz_families,
    fuzz_jobs,
    fuzz_models,
    fuzz_parquet,
    fuzz_recurrent,
    hostile_texts,
)
from tests.faults.crash_states import check_crash_states
from tests.faults.fleet_kills import Kills, kill_launchers, kill_workers
from tests.faults.fuzz import MOST_S, Case, run_cases
from tests.faults.jobs import tiny_job
from tests.faults.kill_scenarios import POISON, echo_job, update_killer
from tests.faults.kills import InBucket, Killer, Pace
from tests.faults.long_answers import LongKiller, long_job
from tests.faults.lossy_files import NeverSynced
from tests.faults.random_edits import update_at_random
from tests.faults.retries import retry_on_a_repaired_model
from tests.faults.violation import ViolationError
from tests.job.fakes import FakeBuild
from tests.job.stores import environment, s3_server

Row = tuple[str, str, str]
"""What was tested, the results, and ``ok`` or a word in capitals."""
MOST_LOST_S = 10.0
"""Maximum age in seconds of the finished rows that a kill may lose."""
KILLS_PER_GIVEN_UP = 50
"""Number of kills per row that may be given up: on a busy machine, runs die soon after loading."""
MOST_TOKENS_LOST_S = 5.0
MOST_LOST_IN_FLEETS_S = 5.0
MOST_TO_STOP_S = 5.0
_MOST_SHOWN = 5
_EXAMPLES = 200
"""Number of sequences of runs that a process tries at a time; each has a few power failures."""
_SAME = "0 lost, 0 duplicated, 0 out of order, same bytes as without kills"


def random_kills(folder: Path, count: int, options: Namespace) -> Iterator[Row]:
    spec = tiny_job(folder, num_rows=2000, rows_per_part=100)
    killer = Killer(folder, spec, None, Pace(1.0, 4096))
    killer.run_unbroken()
    killer.kill_at_random(count, Random(options.seed), 0.02 * killer.seconds, 0.5 * killer.seconds)
    outcome, worst = killer.outcome, max(killer.outcome.again_s)
    few = outcome.given_up <= outcome.kills // KILLS_PER_GIVEN_UP
    yield (
        f"{outcome.kills} kills at random times, {outcome.jobs} jobs of 2,000 rows",
        f"{_SAME}; at most {worst:.1f} s of finished rows lost, "
        f"{outcome.rows_again / outcome.kills:.0f} rows a kill; {outcome.given_up} rows given up "
        "after deaths without progress, and right after --retry-errors",
        ("ok" if few else "TOO MANY GIVEN UP") if worst <= MOST_LOST_S else "TOO MUCH LOST",
    )


def long_answers(folder: Path, count: int, options: Namespace) -> Iterator[Row]:
    """Kill runs a few seconds after their first flush, or just before it."""
    every_s = options.flush_every
    for kind, kills in (("answers", count - count // 4), ("searches", max(1, count // 4))):
        place = folder / kind
        searches = kind == "searches"
        spec = long_job(place, num_rows=16 if searches else 64, searches=searches)
        killer = LongKiller(place, spec, None, Pace(every_s, 4096))
        killer.run_unbroken()
        killer.kill_at_random(kills, Random(options.seed), 1.5 + every_s, 5.0 + 2 * every_s)
        lost, worst = killer.lost, max(killer.lost.seconds)
        yield (
            f"{killer.outcome.kills} kills ({lost.num_with_suspects} with suspected rows) in "
            f"{killer.outcome.jobs} jobs of long {kind}, flushed every {every_s:g} s",
            f"{_SAME}; {sum(lost.tokens) / len(lost.tokens):,.0f} tokens lost a kill, at most "
            f"{max(lost.tokens):,}, from at most {worst:.1f} s; at "
            f"{lost.num_drawn / lost.seconds_drawn:,.0f} tokens/s "
            f"{sum(lost.bytes_written) / lost.seconds_drawn / 1000:,.0f} kB/s are written, token "
            f"files hold at most {lost.most_bytes / 1e6:.1f} MB",
            "ok" if worst <= MOST_TOKENS_LOST_S else "TOO MUCH LOST",
        )


def fleet_workers(folder: Path, count: int, options: Namespace) -> Iterator[Row]:
    yield _fleet_row("workers of fleets", kill_workers(folder, count, options.seed))


def fleet_drivers(folder: Path, count: int, options: Namespace) -> Iterator[Row]:
    kills = kill_launchers(folder, count, options.seed)
    yield _fleet_row(f"workers, with {count} launchers,", kills)


def _fleet_row(what: str, kills: Kills) -> Row:
    worst, count = max(kills.again_s, default=0.0), len(kills.again_s)
    return (
        f"{count} {what} killed, {kills.jobs} jobs of 2,000 rows",
        f"{_SAME}; at most {worst:.1f} s of finished rows lost, "
        f"{kills.rows_again / max(1, count):.0f} rows a kill",
        "ok" if worst <= MOST_LOST_IN_FLEETS_S else "TOO MUCH LOST",
    )


def named_kills(folder: Path, count: int, options: Namespace) -> Iterator[Row]:
    yield _kill_at_points(_small_job(folder), count, options.seed, "runs")


def updates(folder: Path, count: int, options: Namespace) -> Iterator[Row]:
    killer = update_killer(folder)
    killer.run_unbroken()
    yield _kill_at_points(killer, count, options.seed, "updates")


def _kill_at_points(killer: Killer, most: int, seed: int, what: str) -> Row:
    points, random = [*chain.from_iterable(killer.points().values())], Random(seed)
    for point in random.sample(points, min(most, len(points))):
        killer.kill_at(point, random)
    return (
        f"{what} killed at {min(most, len(points))} of {len(points)} failpoints, and once more",
        f"{killer.outcome.kills} kills, {killer.outcome.jobs} jobs: {_SAME}",
        "ok",
    )


def stops(folder: Path, count: int, options: Namespace) -> Iterator[Row]:
    waited = _small_job(folder).stop_at_random(count, Random(options.seed))
    yield (
        f"{count} SIGTERMs at random times",
        f"exit 75 each, at most {max(waited):.2f} s later; resumed: {_SAME}",
        "ok" if max(waited) <= MOST_TO_STOP_S else "TOO SLOW",
    )


def races(folder: Path, count: int, options: Namespace) -> Iterator[Row]:
    exits = Counter(tuple(killer.race()) for killer in [_small_job(folder)] * count)
    yield (
        f"{count} races of two runs for one output",
        ", ".join(f"exits {codes}: {times}" for codes, times in exits.items()),
        _verdict(exits == {(int(ExitCode.OK), int(ExitCode.LOCKED)): count}),
    )


def kills_in_a_store(folder: Path, count: int, options: Namespace) -> Iterator[Row]:
    """Kill runs that write to a store at random times, failpoints or a certain row; race runs."""
    random, num_races = Random(options.seed), max(1, count // 5)
    with s3_server() as address:
        os.environ.update(environment(address))
        build, output = FakeBuild(max_num_seqs=8), InBucket(address)
        killer = Killer(folder, echo_job(folder), build, Pace(1e9, 4), output)
        killer.run_unbroken()
        killer.kill_at_random(count, random, 0.02 * killer.seconds, 0.5 * killer.seconds)
        points = [times[0] for times in killer.points().values()]
        for point in random.sample(points, min(count, len(points))):
            killer.kill_at(point, random)
        exits = Counter(tuple(killer.race()) for _ in range(num_races))
        code = killer.run_until_done(f"row-{POISON}:1", most=20)
        given_up = [row["row_id"] for row in killer.rows() if row["error"]]
    right = exits == {(int(ExitCode.OK), int(ExitCode.LOCKED)): num_races}
    right &= given_up == [POISON] and code == ExitCode.TOO_MANY_ROW_ERRORS
    yield (
        f"{killer.outcome.kills} kills with output in a store, {killer.outcome.jobs} jobs",
        f"{_SAME}; races end in {', '.join(map(str, exits))}; crashed rows: {given_up}, exit "
        f"{code}",
        _verdict(right),
    )


def retries(folder: Path, count: int, options: Namespace) -> Iterator[Row]:
    codes = retry_on_a_repaired_model(folder, count)
    # A job is identified by the hashes of weights, too: with the repaired model, it is another job.
    expected = [ExitCode.TOO_MANY_ROW_ERRORS] * (count + 1) + [ExitCode.LOCKED, ExitCode.OK]
    yield (
        f"a broken model run {count} times and retried; then repaired, run, and retried",
        f"exits {', '.join(map(str, codes))}; the output is right in the end",
        _verdict(codes == expected),
    )


def random_edits(folder: Path, count: int, options: Namespace) -> Iterator[Row]:
    kept = 0
    for at in range(count):
        place = folder / str(at)
        kept += update_at_random(place, Random(options.seed + at), rounds=6)
        shutil.rmtree(place)
    yield (
        f"{6 * count:,} updates after random edits",
        f"same bytes as a new output; {kept:,} rows copied, only rows with new keys computed",
        "ok",
    )


def _crash_states(*, of_updates: bool) -> Callable[..., Iterator[Row]]:
    """Return a stage of power failures in random sequences of runs, retries and updates."""

    def run(folder: Path, count: int, options: Namespace) -> Iterator[Row]:
        tried, what = 0, "power failures of updates" if of_updates else "power failures"
        check = partial(check_crash_states, _EXAMPLES, of_updates=of_updates)
        seeds = iter(range(options.seed, options.seed + count))
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            while tried < count:
                tried += sum(pool.map(check, [next(seeds) for _ in range(options.jobs)]))
        yield f"{tried:,} {what}", "0 violations", "ok"
        is_seen = False
        try:
            check(options.seed, files_type=NeverSynced)
        except ViolationError:
            is_seen = True
        yield f"{what} without fsync", f"violation seen: {is_seen}", _verdict(is_seen)

    return run


def _fuzz(what: str, case: Case, most_s: float = MOST_S) -> Callable[..., Iterator[Row]]:
    """Return a stage that runs many cases in processes."""

    def run(folder: Path, count: int, options: Namespace) -> Iterator[Row]:
        results = run_cases(case, count, options.seed, folder, options.jobs, most_s)
        for violation in results.violations[:_MOST_SHOWN]:
            print(violation)
        words: Counter[str] = Counter()
        for word, times in results.words.items():
            words[word.rpartition(": ")[2]] += times
        tally = ", ".join(f"{times:,} {word}" for word, times in words.most_common())
        wrong = len(results.violations)
        wrongs = f"{wrong} tracebacks, hangs, crashes, poor messages or wrong rows"
        yield f"{count:,} {what}", f"{tally}; {wrongs}", _verdict(not wrong)

    return run


def _small_job(folder: Path) -> Killer:
    """Return a ``Killer`` of a job with 300 rows that writes to disk often."""
    killer = Killer(folder, tiny_job(folder, num_rows=300, rows_per_part=50), None, Pace(1e9, 20))
    killer.run_unbroken()
    return killer


def _verdict(right: bool) -> str:
    return "ok" if right else "WRONG"


@dataclass(frozen=True)
class Stage:
    """A stage with its default count; a count of 0 skips it."""

    count: int
    what: str
    run: Callable[[Path, int, Namespace], Iterator[Row]]


# Stages that fork this process come first.
STAGES = {
    "kills": Stage(200, "kills at random times", random_kills),
    "long-answers": Stage(200, "kills in jobs of long answers", long_answers),
    "fleet-workers": Stage(20, "kills of workers of fleets", fleet_workers),
    "fleet-drivers": Stage(10, "kills of launchers of fleets", fleet_drivers),
    "named": Stage(72, "kills at failpoints", named_kills),
    "updates": Stage(1_000, "most failpoints at which updates are killed", updates),
    "edits": Stage(200, "jobs edited at random and updated, six times each", random_edits),
    "stops": Stage(50, "SIGTERMs at random times", stops),
    "races": Stage(10, "races of two runs for one output", races),
    "store-kills": Stage(12, "kills of jobs with output in an object store", kills_in_a_store),
    "retries": Stage(3, "runs on a broken model", retries),
    "job-files": Stage(20_000, "fuzzed job files", _fuzz("fuzzed job files", fuzz_jobs.case)),
    "parquet-files": Stage(
        10_000, "fuzzed Parquet files", _fuzz("fuzzed Parquet files", fuzz_parquet.case)
    ),
    "hostile": Stage(
        200,
        "hostile templates and tokenizers",
        _fuzz(
            "hostile templates and tokenizers, each stopped by SIGTERM in a second job",
            hostile_texts.case,
            hostile_texts.MOST_S,
        ),
    ),
    "model-folders": Stage(
        2_000,
        "broken model folders",
        _fuzz("broken model folders", fuzz_models.case, fuzz_models.MOST_S),
    ),
    "model-families": Stage(
        20 * len(FAMILIES),
        "random models of many families",
        _fuzz("random models of many families", fuzz_families.case, fuzz_families.MOST_S),
    ),
    "recurrent-models": Stage(
        100,
        "random models with recurrent layers",
        _fuzz(
            f"random models with recurrent layers, run in {fuzz_recurrent.SETUPS} ways each",
            fuzz_recurrent.case,
            fuzz_recurrent.MOST_S,
        ),
    ),
    "states": Stage(50_000, "power failures in jobs", _crash_states(of_updates=False)),
    "update-states": Stage(10_000, "power failures in updates", _crash_states(of_updates=True)),
}
