"""Run a job on a fleet on this machine.

``python -m tests.job.fleet.program FOLDER WORKERS [WORD ...]``, where a word is one of

- a signal's name: one of the workers sends this signal to the program,
- ``paced``: the engines are slow,
- ``update``: update the output,
- ``I/N``: compute this shard; one of the workers is killed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from batchinfer.cli.program import run_program
from batchinfer.job.claims.shard import parse_shard
from batchinfer.job.claims.shared_claim import Role
from tests.job.fleet.engines import Disturbed, Paced
from tests.job.fleet.jobs import fleet_job, run


def main(**_: str) -> None:
    folder, workers, *words = sys.argv[1:]
    place, number = Path(folder), int(workers)
    spec = fleet_job(place, scale={"workers": number, "min_workers": number})
    build: Disturbed | Paced | None = None
    options: dict[str, Any] = {}
    for word in words:
        if word == "update":
            options["update"] = True
        elif "/" in word:
            shard = parse_shard(word, {})
            options["role"] = Role(shard)
            build = Disturbed(place, "SIGKILL", name=shard.writer)
        else:
            own = Disturbed(place, word, at=30, pid=os.getpid())
            build = Paced(place) if word == "paced" else own
    sys.exit(int(run(spec, build, **options)))


if __name__ == "__main__":
    run_program(main)
