"""All processes of a job use the kernels of the process that loaded its model first."""

from __future__ import annotations

import json
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.shared_claim import Role
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from tests.job.fakes import FakeBuild, FakeBuilt


class Choosing(FakeBuild):
    """Builds engines that use the pinned kernels; without pinned kernels they use ``own``."""

    def __init__(self, own: str, barrier: threading.Barrier | None = None) -> None:
        super().__init__(max_num_seqs=4)
        self.own = own
        self.used: list[str] = []
        self._first: weakref.ref[FakeBuilt] | None = None
        self._barrier = barrier

    def __call__(self, *arguments: Any, pinned_kernels: Any = None, **options: Any) -> FakeBuilt:
        assert self._first is None or self._first() is None, "the first model is still in memory"
        built = super().__call__(*arguments, **options)
        self._first = weakref.ref(built)
        built.kernels = {"float32": self.own, "attention": self.own} | (pinned_kernels or {})
        self.used.append(built.kernels["float32"])
        if self._barrier is not None and len(self.used) == 1:
            self._barrier.wait(60)
        return built


WORKERS = (Role(is_worker=True), Role(is_worker=True))
SHARDS = (Role(Shard(0, 2)), Role(Shard(1, 2)))


@pytest.mark.parametrize("roles", [WORKERS, SHARDS], ids=["workers", "shards"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_processes_that_load_at_the_same_time_use_the_same_kernels(
    spec: JobSpec, roles: tuple[Role, Role], overwrite: bool
) -> None:
    barrier = threading.Barrier(2)
    builds = [Choosing("AMX", barrier), Choosing("AVX2", barrier)]
    codes: list[ExitCode] = []

    def run(role: Role, build: Choosing) -> None:
        codes.append(run_job(spec, role=role, build=build, quiet=True, overwrite=overwrite))

    threads = [threading.Thread(target=run, args=pair) for pair in zip(roles, builds, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [ExitCode.OK] * 2
    last = {build.used[-1] for build in builds}
    assert len(last) == 1
    assert sorted(build.count for build in builds) == [1, 2], "the slower process loads again"
    state = Path(spec.output.path) / "_batchinfer"
    noted = json.loads((state / "kernels.json").read_bytes())
    assert {noted["float32"]} == last
    runs = [json.loads(path.read_bytes()) for path in (state / "runs").iterdir()]
    assert {run["kernels"]["float32"] for run in runs} == last


def test_a_later_shard_loads_once_with_the_stored_kernels(spec: JobSpec) -> None:
    first, second = Choosing("AMX"), Choosing("AVX2")
    for role, build in zip(SHARDS, (first, second), strict=True):
        assert run_job(spec, role=role, build=build, quiet=True) is ExitCode.OK
    assert (first.used, second.used) == (["AMX"], ["AMX"])


def test_a_run_without_kept_rows_does_not_pin_kernels(spec: JobSpec) -> None:
    def die(_number: int) -> None:
        raise KeyboardInterrupt

    first, second = Choosing("AMX"), Choosing("AVX2")
    first.before_step = die
    with pytest.raises(KeyboardInterrupt):
        run_job(spec, build=first, quiet=True)
    assert run_job(spec, build=second, quiet=True) is ExitCode.OK
    assert second.used == ["AVX2"]


def test_a_damaged_kernels_file_is_written_again(spec: JobSpec) -> None:
    run_job(spec, role=SHARDS[0], build=Choosing("AMX"), quiet=True)
    note = Path(spec.output.path) / "_batchinfer" / "kernels.json"
    note.write_bytes(b"{torn")
    run_job(spec, role=SHARDS[1], build=Choosing("AVX2"), quiet=True)
    assert json.loads(note.read_bytes())["float32"] == "AVX2"
