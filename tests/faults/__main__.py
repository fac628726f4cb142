"""``make faults``: the long part of the tests against faults, and a table of what it found."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random

from tests.faults.children import Pace
from tests.faults.jobs import import_model_code, tiny_job
from tests.faults.kills import Killer
from tests.faults.lossy_files import LossyFiles, NeverSynced
from tests.faults.states import count_violations
from tests.faults.violation import ViolationError

Row = tuple[str, str, str]
STATES_AT_ONCE = 1000


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
        "ok" if worst <= 10 else "TOO MUCH AGAIN",
    )


def named_kills(folder: Path, most: int, seed: int) -> Row:
    killer = Killer(folder, tiny_job(folder, num_rows=300, rows_per_part=50), None, Pace(1e9, 20))
    killer.run_unbroken()
    random = Random(seed)
    points = list(killer.named_points())[:most]
    for point in points:
        killer.kill_at(point, random)
    return (
        f"{len(points)} kills at named points, each with one more while going on",
        f"{killer.outcome.jobs} jobs as unbroken, {killer.outcome.kills} kills in all",
        "ok",
    )


def crash_states(states: int, seed: int, jobs: int) -> Row:
    counts = _count(LossyFiles, states, seed, jobs)
    right = counts["wrong"] == 0 and counts["states"] == states
    return f"{counts['states']:,} crash states", f"{counts['wrong']} violations", _word(right)


def crash_states_without_sync(states: int, seed: int, jobs: int) -> Row:
    counts = _count(NeverSynced, states, seed, jobs)
    what = f"{counts['states']:,} crash states without fsync"
    return what, f"{counts['wrong']:,} violations seen", _word(counts["wrong"] > 0)


def _count(files: type[LossyFiles], states: int, seed: int, jobs: int) -> Counter[str]:
    sizes = [STATES_AT_ONCE] * (states // STATES_AT_ONCE) + [states % STATES_AT_ONCE]
    seeds = range(seed, seed + len(sizes))
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        found = pool.map(partial(count_violations, files), sizes, seeds)
        return sum(found, Counter())


def _word(right: bool) -> str:
    return "ok" if right else "WRONG"


def _rows(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    kills, named = folder / "random", folder / "named"
    for place in (kills, named):
        place.mkdir()
    if options.kills:
        yield random_kills(kills, options.kills, options.seed)
    if options.named:
        yield named_kills(named, options.named, options.seed)
    if options.states:
        yield crash_states(options.states, options.seed, options.jobs)
        yield crash_states_without_sync(max(1, options.states // 25), options.seed, options.jobs)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="kills at random times")
    parser.add_argument("--named", type=int, default=72, help="kills at named points")
    parser.add_argument("--states", type=int, default=50_000, help="crash states")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of all that is random")
    parser.add_argument("--jobs", type=int, default=2, help="processes for crash states")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    import_model_code()
    failed = False
    try:
        for what, found, word in _rows(options, folder):
            failed |= word != "ok"
            print(f"| {what} | {found} | {word} |", flush=True)
    except ViolationError as violation:
        print(f"VIOLATION: {violation}\nsee {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
