"""The short kills, on an engine without a model: ``python -m tests.faults.quick SCENARIO FOLDER``.

A program of its own, because it forks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from random import Random

from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.shared import Role
from batchinfer.job.spec.spec import JobSpec
from tests.faults.children import Pace
from tests.faults.kills import STAGES, Killer
from tests.faults.update_kills import UpdateKiller
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, drawn, drawn_at_length, job

POISON = 17


def echo_job(folder: Path) -> JobSpec:
    """A job of 60 rows in 6 parts."""
    prompts = [f"{row if row % 5 else 'x'} asks" for row in range(60)]
    write_parquet(folder / "in" / "x.parquet", {"prompt": prompts})
    return job(folder, engine={"max_num_seqs": 8})


def kill_at_named_points(folder: Path) -> dict[str, object]:
    """A kill at each commit step of each kind of file, the first, a middle or the last time."""
    killer = Killer(folder, echo_job(folder), FakeBuild(max_num_seqs=8), Pace(1e9, 4))
    killer.run_unbroken()
    random = Random(1)
    points = list(killer.named_points())
    for at in range(0, len(points), 3):
        killer.kill_at(points[at + at // 3 % 3], random)
    return {"points": len(points), "jobs": killer.outcome.jobs, "kills": killer.outcome.kills}


def kill_a_shard_at_named_points(folder: Path) -> dict[str, object]:
    """The same with the first of two shards; some points only."""
    build = FakeBuild(max_num_seqs=8)
    killer = Killer(folder, echo_job(folder), build, Pace(1e9, 4), role=Role(Shard(0, 2)))
    killer.run_unbroken()
    random = Random(1)
    points = list(killer.named_points())[2::8]
    for point in points:
        killer.kill_at(point, random)
    return {"points": len(points), "jobs": killer.outcome.jobs, "kills": killer.outcome.kills}


def kill_by_a_row_of_a_shard(folder: Path) -> dict[str, object]:
    """A row that kills the shard that it is of."""
    build = FakeBuild(max_num_seqs=8)
    killer = Killer(folder, echo_job(folder), build, Pace(1e9, 4), role=Role(Shard(0, 2)))
    return _given_up(killer, f"row-{POISON}:1")


def kill_while_accepting(folder: Path) -> dict[str, object]:
    """The same with samples that are drawn, judged and drawn on; some points only."""
    spec = echo_job(folder)
    asked = {"regex": "^.b", "k": 2, "max_tries": 9, "dedup": True}
    spec = JobSpec.model_validate(
        {**spec.model_dump(by_alias=True), "accept": asked, "sampling": {"max_tokens": 6}}
    )
    build = FakeBuild(max_num_seqs=8, next_token=drawn)
    killer = Killer(folder, spec, build, Pace(1e9, 4))
    killer.run_unbroken()
    random = Random(1)
    points = list(killer.named_points())[1::20]
    for point in points:
        killer.kill_at(point, random)
    return {"points": len(points), "jobs": killer.outcome.jobs, "kills": killer.outcome.kills}


def kill_while_tokens_are_kept(folder: Path) -> dict[str, object]:
    """Long answers, whose tokens go to disk with every turn: each commit step of their files."""
    spec = echo_job(folder)
    sampling = {"max_tokens": 20, "temperature": 1.0, "seed": 1, "n": 2}
    spec = JobSpec.model_validate(
        {
            **spec.model_dump(by_alias=True),
            "sampling": sampling,
            "input": {**spec.input.model_dump(by_alias=True), "limit": 6},
        }
    )
    build = FakeBuild(max_num_seqs=8, next_token=drawn_at_length)
    killer = Killer(folder, spec, build, Pace(0.0, 4096))
    killer.run_unbroken()
    random = Random(1)
    for times, stage in enumerate(STAGES, start=2):
        killer.kill_at(f"tokens-{stage}:{times}", random)
    tokens = killer.output.files().keys()
    left = [name for name in tokens if name.startswith("_batchinfer/tokens/")]
    return {"jobs": killer.outcome.jobs, "kills": killer.outcome.kills, "left": left}


def kill_by_a_row(folder: Path) -> dict[str, object]:
    """A row that kills the process whenever it comes to the engine."""
    killer = Killer(folder, echo_job(folder), FakeBuild(max_num_seqs=8), Pace(1e9, 4))
    return _given_up(killer, f"row-{POISON}:1")


def kill_by_a_prompt(folder: Path) -> dict[str, object]:
    """A row that kills the process whenever it is made into a prompt."""
    killer = Killer(folder, echo_job(folder), FakeBuild(max_num_seqs=8), Pace(1e9, 4))
    return _given_up(killer, f"prompt-{POISON}:1")


def _given_up(killer: Killer, failpoint: str) -> dict[str, object]:
    code = killer.run_until_done(failpoint, most=20)
    errors = {row["row_id"]: row["error"]["code"] for row in killer.rows() if row["error"]}
    return {"code": code, "errors": errors, "kills": killer.outcome.kills}


def stop_and_race(folder: Path) -> dict[str, object]:
    """SIGTERMs at random times; two runs at once for one output."""
    killer = Killer(folder, echo_job(folder), FakeBuild(max_num_seqs=8), Pace(1e9, 4))
    killer.run_unbroken()
    waited = killer.stop_at_random(3, Random(1))
    return {"stops": len(waited), "races": [killer.race() for _ in range(2)]}


def kill_an_update(folder: Path) -> dict[str, object]:
    """A kill at each step of an update's swap, and at some of the points before it."""
    killer = UpdateKiller(folder)
    random = Random(1)
    points = killer.points()
    of_swap = {point.partition(":")[0]: point for point in points if point.startswith("swap-")}
    for point in [*of_swap.values(), *points[::25]]:
        killer.kill_at(point, random)
    return {"points": len(points), "steps": len(of_swap), "kills": killer.kills}


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        *(kill_at_named_points, kill_by_a_row, kill_by_a_prompt, stop_and_race),
        *(
            kill_while_accepting,
            kill_while_tokens_are_kept,
            kill_a_shard_at_named_points,
            kill_by_a_row_of_a_shard,
        ),
        kill_an_update,
    )
}

if __name__ == "__main__":
    print(json.dumps(SCENARIOS[sys.argv[1]](Path(sys.argv[2]))), flush=True)
    # At an ordinary end the thread pools of libraries are taken down, and in a process that has
    # forked that aborts once in ten times. What is tested are the children.
    os._exit(0)
