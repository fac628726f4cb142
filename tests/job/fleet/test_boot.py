"""A worker that finds another job, model, input or disk than its driver does not run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from batchinfer.job.fleet.boot import WorkerProcess, WorkerSetup
from batchinfer.job.fleet.messages import Failure, Ready
from batchinfer.job.job import identified, open_input, open_job
from batchinfer.job.output.open import output_at
from batchinfer.job.output.resume import clear_output, plan_resume
from tests.job.fakes import FakeBuild, begin
from tests.job.fleet.jobs import fleet_job, write_rows


@pytest.fixture
def setup(tmp_path: Path) -> WorkerSetup:
    """What a driver starts its workers with."""
    write_rows(tmp_path, 10)
    spec = fleet_job(tmp_path)
    job = open_job(spec, identified(open_input(spec), None))
    out = output_at(spec.output.path)
    begin(out, job.manifest)
    out.write(out.permit, b"of this driver")
    fingerprint = job.manifest.fingerprint
    return WorkerSetup(spec, job.manifest, fingerprint, b"of this driver", build=FakeBuild())


def why_not(setup: WorkerSetup) -> Failure:
    """What a worker says that does not start."""
    found = WorkerProcess(setup, "w01", "run-00001-w01").load()
    assert isinstance(found, Failure)
    return found


def test_a_disk_that_is_not_shared_is_named_with_what_to_do(setup: WorkerSetup) -> None:
    failure = why_not(replace(setup, nonce=b"of another one"))
    assert failure.kind == "StorageError"
    assert "another output is at" in failure.text
    assert "a disk that all nodes share" in failure.text


def test_a_copy_of_the_input_may_have_another_time(setup: WorkerSetup) -> None:
    copy = Path(setup.manifest.inputs[0].path)
    os.utime(copy, ns=(5, 5))
    worker = WorkerProcess(setup, "w01", "run-00001-w01")
    assert isinstance(worker.load(), Ready)
    worker.stop()


def test_an_output_that_is_overwritten_meanwhile_is_the_drivers_own(setup: WorkerSetup) -> None:
    out = output_at(setup.spec.output.path)
    clear_output(out, plan_resume(out, setup.manifest, "overwrite"))
    worker = WorkerProcess(setup, "w01", "run-00001-w01")
    assert isinstance(worker.load(), Ready)
    worker.stop()
    assert worker.report(60.0).is_over


def test_what_a_worker_stages_is_in_a_folder_of_its_run(setup: WorkerSetup) -> None:
    worker = WorkerProcess(setup, "w01", "run-00003-w01")
    assert isinstance(worker.load(), Ready)
    worker.stop()
    assert worker.report(60.0).is_over
    staging = output_at(setup.spec.output.path).staging
    assert [path.name for path in Path(staging).iterdir()] == ["run-00003-w01"]


def test_another_input(setup: WorkerSetup, tmp_path: Path) -> None:
    write_rows(tmp_path, 11)
    assert "the input is another on this node" in why_not(setup).text


def test_another_model(setup: WorkerSetup) -> None:
    assert "the model is another on this node" in why_not(replace(setup, fingerprint="0")).text


def test_other_versions(setup: WorkerSetup) -> None:
    versions = {**setup.versions, "pyarrow": "1.0"}
    found = why_not(replace(setup, versions=versions))
    assert "pyarrow is" in found.text
    assert "1.0 on the driver's" in found.text
