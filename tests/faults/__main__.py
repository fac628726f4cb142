"""``make faults``: the long part of the tests against faults, and a table of what it found."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.families import FAMILIES
from tests.faults import stages
from tests.faults.jobs import import_model_code
from tests.faults.violation import ViolationError

_COUNTS = {
    "kills": (200, "kills at random times"),
    "long-answers": (200, "kills in jobs of long answers"),
    "fleet-workers": (20, "kills of workers of fleets"),
    "fleet-drivers": (10, "kills of drivers of fleets"),
    "named": (72, "kills at named points"),
    "stops": (50, "SIGTERMs at random times"),
    "updates": (1_000, "named points at which updates are killed, if there are so many"),
    "edits": (200, "jobs edited at random and updated, six times each"),
    "races": (10, "races of two runs for one output"),
    "store-kills": (12, "kills of jobs whose output is in an object store"),
    "retries": (3, "runs on a broken model"),
    "job-files": (20_000, "fuzzed job files"),
    "parquet-files": (10_000, "fuzzed Parquet files"),
    "hostile": (200, "hostile templates and tokenizers"),
    "model-folders": (2_000, "broken model folders"),
    "model-families": (20 * len(FAMILIES), "random models of many families"),
    "states": (50_000, "crash states"),
    "update-states": (10_000, "crash states of updates"),
}
"""Options: how often, and of what; 0 leaves it out."""


def _rows(options: argparse.Namespace, folder: Path) -> Iterator[stages.Row]:
    """Run what is asked for: what forks this process first."""
    seed, jobs = options.seed, options.jobs
    if options.kills:
        yield stages.random_kills(_new(folder), options.kills, seed)
    if options.long_answers:
        searches, every_s = options.long_answers // 4, options.flush_every
        yield stages.long_answers(_new(folder), options.long_answers - searches, seed, every_s)
        yield stages.long_answers(_new(folder), max(1, searches), seed, every_s, searches=True)
    if options.fleet_workers:
        yield stages.fleet_workers(_new(folder), options.fleet_workers, seed)
    if options.fleet_drivers:
        yield stages.fleet_drivers(_new(folder), options.fleet_drivers, seed)
    if options.named:
        yield stages.named_kills(_new(folder), options.named, seed)
    if options.updates:
        yield stages.kills_of_updates(_new(folder), options.updates, seed)
    if options.edits:
        yield stages.random_edits(_new(folder), options.edits, seed)
    if options.stops:
        yield stages.stops(_new(folder), options.stops, seed)
    if options.races:
        yield stages.races(_new(folder), options.races)
    if options.store_kills:
        yield stages.kills_in_a_store(_new(folder), options.store_kills, seed)
    if options.retries:
        yield stages.retries(_new(folder), options.retries)
    if options.job_files:
        yield stages.fuzzed_job_files(_new(folder), options.job_files, seed, jobs)
    if options.parquet_files:
        yield stages.fuzzed_parquet_files(_new(folder), options.parquet_files, seed, jobs)
    if options.hostile:
        yield stages.hostile_prompts(_new(folder), options.hostile, seed, jobs)
    if options.model_folders:
        yield stages.broken_model_folders(_new(folder), options.model_folders, seed, jobs)
    if options.model_families:
        yield stages.random_models(_new(folder), options.model_families, seed, jobs)
    if options.states:
        yield stages.crash_states(options.states, seed, jobs)
        yield stages.crash_states_without_sync(max(1, options.states // 25), seed, jobs)
    if options.update_states:
        yield stages.crash_states_of_updates(options.update_states, seed, jobs)


def _new(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "stages", nargs="*", choices=_COUNTS, metavar="STAGE", help="run these alone; else all"
    )
    for name, (count, what) in _COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=count, help=what)
    parser.add_argument(
        "--flush-every",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds between flushes of long answers: a second has runs of a few get on",
    )
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of all that is random")
    parser.add_argument("--jobs", type=int, default=2, help="processes, where there are several")
    options = parser.parse_args()
    for name in _COUNTS.keys() - (options.stages or _COUNTS):
        setattr(options, name.replace("-", "_"), 0)
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
