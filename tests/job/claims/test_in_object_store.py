"""Shards that write to an object store; moto's server stands in for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import ExitCode, LockedError
from batchinfer.job.claims import writers
from batchinfer.job.claims.claim import refuse_workers_of_updates
from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.shared_claim import Role, SharedClaim
from batchinfer.job.claims.writers import Writer, lives, own_lock
from batchinfer.job.input.dataset import open_source
from batchinfer.job.job import identified, open_job
from batchinfer.job.output.open import output_at
from batchinfer.job.output.resume import ResumePlan, plan_of
from batchinfer.job.output.verify import verify
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.storage import connection, object_lock
from batchinfer.job.storage.failpoints import VARIABLE
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job
from tests.job.stores import LAKE, environment, objects, point_to, s3_server

OUT = f"{LAKE}/shards/out"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def spec(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobSpec]:
    point_to(server, monkeypatch)
    prompts = [f"{row} asks" for row in range(35)]
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": prompts})
    yield job(tmp_path, output={"path": f"{OUT}-{tmp_path.name}"})
    connection.connect.cache_clear()


@pytest.mark.long
def test_killed_shard_in_a_store_is_resumed(spec: JobSpec, tmp_path: Path, server: str) -> None:
    program = [sys.executable, "-m", "tests.job.claims.program", str(tmp_path)]
    started = [
        subprocess.Popen(
            [*program, shard, f"path={spec.output.path}"],
            env={**os.environ, **environment(server), VARIABLE: failpoint},
        )
        for shard, failpoint in (("0/2", "parts-staged:1"), ("1/2", ""))
    ]
    assert [process.wait() for process in started] == [-signal.SIGKILL, 0]
    out = output_at(spec.output.path)
    assert (verify(out).problems, verify(out).parts_done) == ([], 2)
    assert run_job(spec, role=Role(Shard(0, 2)), build=FakeBuild(), quiet=True) is ExitCode.OK
    alone = job(tmp_path)
    run_job(alone, build=FakeBuild(), quiet=True)
    data = {path.name: path.read_bytes() for path in (tmp_path / "out" / "data").iterdir()}
    key = spec.output.path.removeprefix(f"{LAKE}/")
    assert objects(f"{key}/data") == data
    assert (verify(out).problems, verify(out).complete) == ([], True)


def test_living_shard_in_a_store_refuses_other_writers(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "ALONE_PATIENCE_S", 0.0)
    out = output_at(spec.output.path)
    with own_lock(out, Writer(Shard(1, 2))).locked():
        for refused in (None, Role(Shard(1, 2)), Role(Shard(0, 3))):
            with pytest.raises(LockedError, match=r"shard 1/2"):
                run_job(spec, role=refused, build=FakeBuild(), quiet=True)
        assert run_job(spec, role=Role(Shard(0, 2)), build=FakeBuild(), quiet=True) is ExitCode.OK
    with out.locked(), pytest.raises(LockedError, match="another run is writing to"):
        run_job(spec, role=Role(Shard(1, 2)), build=FakeBuild(), quiet=True)


def test_shard_that_slept_too_long_loses_its_lock(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = output_at(spec.output.path)
    shard = own_lock(out, Writer(Shard(0, 2)))
    with shard.locked():
        assert lives(out, Writer(Shard(0, 2)))
        monkeypatch.setattr(object_lock, "LAPSE_S", -1e9)
        assert not lives(out, Writer(Shard(0, 2)))
        with pytest.raises(LockedError, match="another run has taken over"):
            shard.lock.confirm()  # type: ignore[attr-defined]


def test_shard_that_slept_in_the_directory_lock_keeps_the_plan_of_its_sibling(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = output_at(spec.output.path)
    manifest = open_job(spec, identified(open_source(spec.input.paths), None)).manifest
    siblings = replace(manifest, planned_at="2026-01-01T00:00:00")
    agree = SharedClaim._agree

    def agree_and_sleep(claim: SharedClaim, *arguments: Any, **options: Any) -> ResumePlan:
        agreed = agree(claim, *arguments, **options)
        monkeypatch.setattr(SharedClaim, "_agree", agree)
        with monkeypatch.context() as passed:
            passed.setattr(object_lock, "LAPSE_S", -1e9)
            with SharedClaim(out, Role(Shard(1, 2)), 1).begun(siblings, "resume"):
                pass
        return agreed

    monkeypatch.setattr(SharedClaim, "_agree", agree_and_sleep)
    awakened = SharedClaim(out, Role(Shard(0, 2)), 1).begun(manifest, "resume")
    with pytest.raises(LockedError, match="another run has taken over"), awakened:
        pass
    assert plan_of(out).planned_at == siblings.planned_at


def test_dead_worker_of_an_update_is_no_obstacle(spec: JobSpec) -> None:
    """A killed launcher leaves the claims of its workers in the generation that they made."""
    out = output_at(spec.output.path)
    generation = output_at(str(out.next / "abc"))
    with generation.locked():
        generation.write(generation.locks / "w01", b"")  # its lock has lapsed
        generation.write(generation.claims / "w01.json", b"{}")
    refuse_workers_of_updates(out)
    assert generation.files.entries(generation.claims) == []
