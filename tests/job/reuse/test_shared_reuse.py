"""Reuse of rows by shards and by workers of a fleet, and from their outputs."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.shared_claim import Role
from batchinfer.job.run.run_job import run_job
from tests.job.fakes import TellingBuild
from tests.job.fleet.jobs import expected, fleet_job, part_hashes, run, write_rows
from tests.job.reuse.test_reuse import Story, numbered


def test_shards_reuse_and_are_reused(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.write(numbered(50))
    story.run("one")
    story.write(numbered(55))
    two = story.spec("two", ("one",))
    ran: list[int] = []
    for index in range(3):
        build = TellingBuild()
        assert run_job(two, build=build, quiet=True, role=Role(Shard(index, 3))) is ExitCode.OK
        ran += build.ran
    assert sorted(ran) == list(range(50, 55))
    story.check("two")
    assert story.summary("two")["rows"]["reused"] == 50
    assert story.run("three", "two") == []


@pytest.mark.long
def test_a_fleet_reuses_and_is_reused(tmp_path: Path) -> None:
    write_rows(tmp_path, 300)
    one = fleet_job(tmp_path, output={"path": str(tmp_path / "one")})
    assert run(one) == ExitCode.OK
    write_rows(tmp_path, 320)
    two = fleet_job(tmp_path, output={"reuse": [one.output.path]})
    assert run(two) == ExitCode.OK
    requests = pq.read_table(tmp_path / "out" / "stats" / "requests.parquet")
    assert sorted(requests["row_id"].to_pylist()) == list(range(300, 320))
    assert part_hashes(tmp_path / "out") == expected(tmp_path, two)
