"""Jobs that run on an engine without a model, and are killed.

``python -m tests.faults.kill_scenarios SCENARIO FOLDER`` prints the results of a scenario as JSON.
It is a separate program because it forks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.shared_claim import Role
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from tests.faults.kills import STAGES, Killer, Pace
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, drawn, drawn_at_length, job

POISON = 17
OFTEN = Pace(1e9, 4)
SHARD = Role(Shard(0, 2))


def echo_job(folder: Path, **sections: dict[str, Any]) -> JobSpec:
    """Return a job with 60 rows in 6 parts."""
    prompts = [f"{row if row % 5 else 'x'} asks" for row in range(60)]
    write_parquet(folder / "in" / "x.parquet", {"prompt": prompts})
    return job(folder, engine={"max_num_seqs": 8}, **sections)


def update_killer(folder: Path) -> Killer:
    """Return a ``Killer`` of updates; the new input has added, deleted and changed rows."""
    path, build = folder / "in" / "x.parquet", FakeBuild(max_num_seqs=8, next_token=drawn)
    sampling, output = {"max_tokens": 6, "temperature": 1.0}, {"path": str(folder / "old")}
    spec = echo_job(folder, sampling=sampling, output={**output, "rows_per_part": 10})
    prompts = [f"{row if row % 5 else 'x'} asks" for row in range(40)]
    write_parquet(path, {"prompt": prompts})
    run_job(spec, build=build, quiet=True)
    write_parquet(path, {"prompt": [*prompts[3:20], "new", *prompts[20:], "another"]})
    return Killer(folder, spec, build, OFTEN, finished=folder / "old")


def _killed(killer: Killer, points: list[str]) -> dict[str, object]:
    random = Random(1)
    for point in points:
        killer.kill_at(point, random)
    jobs, kills = killer.outcome.jobs, killer.outcome.kills
    return {"points": len(points), "jobs": jobs, "kills": kills, "names": list(killer.points())}


def kill_a_run(folder: Path) -> dict[str, object]:
    """Kill a run at each failpoint: the first, a middle or the last time that it is reached."""
    killer = Killer(folder, echo_job(folder), FakeBuild(max_num_seqs=8), OFTEN)
    killer.run_unbroken()
    points = enumerate(killer.points().values())
    return _killed(killer, [times[at % len(times)] for at, times in points])


def kill_a_shard(folder: Path) -> dict[str, object]:
    killer = Killer(folder, echo_job(folder), FakeBuild(max_num_seqs=8), OFTEN, role=SHARD)
    killer.run_unbroken()
    return _killed(killer, [times[-1] for times in list(killer.points().values())[::3]])


def kill_an_update(folder: Path) -> dict[str, object]:
    """Kill updates at each step of the swap, and at some failpoints before it."""
    killer = update_killer(folder)
    killer.run_unbroken()
    points = killer.points()
    swap = [times[-1] for name, times in points.items() if name.startswith("swap-")]
    return _killed(killer, [*swap, *[times[0] for times in list(points.values())[::8]]])


def kill_while_accepting(folder: Path) -> dict[str, object]:
    """Kill runs that draw, judge and redraw samples."""
    accept = {"regex": "^.b", "k": 2, "max_tries": 9, "dedup": True}
    # At temperature 0, equal rows would share an answer, but ``drawn`` gives each row its own.
    spec = echo_job(folder, accept=accept, sampling={"max_tokens": 6, "temperature": 1.0})
    killer = Killer(folder, spec, FakeBuild(max_num_seqs=8, next_token=drawn), OFTEN)
    killer.run_unbroken()
    return _killed(killer, [times[0] for times in list(killer.points().values())[1::7]])


def kill_while_tokens_are_kept(folder: Path) -> dict[str, object]:
    """Kill runs with long answers at each commit step of a token file."""
    sampling = {"max_tokens": 20, "temperature": 1.0, "seed": 1, "n": 2}
    spec = echo_job(folder, sampling=sampling)
    limited = spec.input.model_copy(update={"limit": 6})
    build = FakeBuild(max_num_seqs=8, next_token=drawn_at_length)
    killer = Killer(folder, spec.model_copy(update={"input": limited}), build, Pace(0.0, 4096))
    killer.run_unbroken()
    results = _killed(killer, [f"tokens-{stage}:{at}" for at, stage in enumerate(STAGES, start=2)])
    names = [name for name in killer.output.files() if name.startswith("_batchinfer/tokens/")]
    return {**results, "remaining": names}


def kill_by_a_row(folder: Path) -> dict[str, object]:
    """Kill the process whenever the engine gets a certain row."""
    killer = Killer(folder, echo_job(folder), FakeBuild(max_num_seqs=8), OFTEN)
    return _given_up(killer, f"row-{POISON}:1")


def kill_by_a_prompt(folder: Path) -> dict[str, object]:
    """Kill the process whenever it builds the prompt of a certain row."""
    killer = Killer(folder, echo_job(folder), FakeBuild(max_num_seqs=8), OFTEN)
    return _given_up(killer, f"prompt-{POISON}:1")


def kill_a_shard_by_a_row(folder: Path) -> dict[str, object]:
    killer = Killer(folder, echo_job(folder), FakeBuild(max_num_seqs=8), OFTEN, role=SHARD)
    return _given_up(killer, f"row-{POISON}:1")


def _given_up(killer: Killer, failpoint: str) -> dict[str, object]:
    code = killer.run_until_done(failpoint, most=20)
    errors = {row["row_id"]: row["error"]["code"] for row in killer.rows() if row["error"]}
    return {"code": code, "errors": errors, "kills": killer.outcome.kills}


def stop_and_race(folder: Path) -> dict[str, object]:
    """Stop runs with SIGTERM at random times; start two runs at once for one output."""
    killer = Killer(folder, echo_job(folder), FakeBuild(max_num_seqs=8), OFTEN)
    killer.run_unbroken()
    waited = killer.stop_at_random(3, Random(1))
    return {"stops": len(waited), "races": [killer.race() for _ in range(2)]}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))), flush=True)
    # Skip the interpreter's shutdown: in a process that has forked, the thread pools of
    # libraries sometimes abort.
    os._exit(0)
