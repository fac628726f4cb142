"""Jobs that write to an object store; moto's server stands in for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import from_url
from typer.testing import CliRunner

from batchinfer.cli.commands import app
from batchinfer.errors import ExitCode, LockedError, StorageError, UsageError, install_command
from batchinfer.job.output import part_writer
from batchinfer.job.output.open import output_at
from batchinfer.job.output.verify import verify
from batchinfer.job.run import pipeline
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.storage import connection, object_lock
from tests.job.datasets import write_parquet
from tests.job.fakes import AtOnce, FakeBuild, TellingBuild, job
from tests.job.stores import (
    BUCKET,
    LAKE,
    SECRET,
    Request,
    between,
    complaining_server,
    environment,
    objects,
    point_to,
    s3_server,
)
from tests.job.update.test_swap import CutOff, cut_off_at

NUM_ROWS = 25
OUT = f"{LAKE}/out/dt=1"
KEY = "out/dt=1"
_KILLED = """
import os, sys
from pathlib import Path
from batchinfer.job.run import pipeline
from batchinfer.job.output import part_writer
from batchinfer.job.run.run_job import run_job
from tests.job.fakes import AtOnce, FakeBuild, TellingBuild, job
build, part_writer.FLUSH_ROWS, pipeline.BackgroundConsumer = FakeBuild(max_num_seqs=4), 4, AtOnce
build.before_step = lambda step: os.kill(os.getpid(), 9) if step == 30 else None
output = {"path": sys.argv[2], "rows_per_part": 10}
run_job(job(Path(sys.argv[1]), output=output), build=build, quiet=True)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def address(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    point_to(server, monkeypatch)
    yield server
    point_to(server, monkeypatch)
    below = list(objects(KEY))
    obstore.delete(bucket(), [f"{KEY}/{name}" for name in below])
    connection.connect.cache_clear()


@pytest.fixture
def spec(tmp_path: Path, address: str) -> JobSpec:
    prompts = [f"{row % 7} asks {row}" for row in range(NUM_ROWS)]
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": prompts})
    return job(tmp_path, output={"path": OUT})


def bucket() -> Any:
    return from_url(f"s3://{BUCKET}", client_options={"allow_http": True})


def run(spec: JobSpec, build: FakeBuild | None = None, **options: bool) -> ExitCode:
    return run_job(spec, build=build or FakeBuild(), quiet=True, **options)


def rows(num_rows: int = NUM_ROWS) -> pa.Table:
    """Check every row of the output; return the output."""
    parts = sorted((name, data) for name, data in objects(f"{KEY}/data").items())
    assert [name for name, _ in parts] == [f"part-{at:05d}.parquet" for at in range(len(parts))]
    table = pa.concat_tables(pq.read_table(BytesIO(data)) for _, data in parts)
    assert table["row_id"].to_pylist() == list(range(num_rows))
    assert table["generated_text"].to_pylist() == [p and p[:8] for p in table["prompt"].to_pylist()]
    return table


def change(name: str, data: bytes) -> None:
    obstore.put(bucket(), f"{KEY}/{name}", data)


def test_update_cut_off_in_a_store_is_completed(
    spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(spec) is ExitCode.OK
    before = objects(f"{KEY}/data")
    prompts = [f"{row % 7} asks {row}" for row in range(2, NUM_ROWS - 6)]
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": prompts})
    with monkeypatch.context() as patch:
        cut_off_at(patch, "hidden", times=1)
        with pytest.raises(CutOff):
            run(spec, update=True)
    assert objects(f"{KEY}/data") == before
    assert "_SUCCESS" not in objects(KEY)
    build = FakeBuild()
    assert run(spec, build) is ExitCode.OK
    assert build.count == 0, "the update is put in place without computing rows"
    rows(len(prompts))
    assert not verify(output_at(OUT)).problems
    left = [name for name in objects(KEY) if "/next/" in name or "swap" in name]
    assert left == []


def test_job_status_and_verify_in_a_store(
    spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert run(spec) is ExitCode.OK
    assert sorted(tmp_path.rglob("*")) == before, "no file is written to this machine"
    rows()
    found = objects(KEY)
    assert {"_SUCCESS", "summary.json", "stats/steps.parquet", "stats/requests.parquet"} <= set(
        found
    )
    assert not [name for name in found if "probe" in name or "segments" in name]
    steps = pq.read_table(BytesIO(found["stats/steps.parquet"]))
    tokens = json.loads(found["summary.json"])["tokens"]
    assert sum(steps["prefill_tokens"].to_pylist()) == tokens["prompt_computed"]

    again = FakeBuild()
    assert run(spec, again) is ExitCode.OK
    assert again.count == 0, "nothing is left to do"
    assert objects(KEY) == found

    cli = CliRunner()
    status = json.loads(cli.invoke(app, ["status", OUT, "--json"]).stdout)
    assert (status["state"], status["rows_done"], status["parts_done"]) == ("finished", NUM_ROWS, 3)
    checked = cli.invoke(app, ["verify", f"{OUT}/"])
    assert (checked.exit_code, checked.stdout) == (
        0,
        f"finished: 3 of 3 parts, {NUM_ROWS} rows; everything matches its record\n",
    )
    assert cli.invoke(app, ["status", f"{LAKE}/nothing"]).exit_code != 0


def test_secrets_are_in_no_artifact(spec: JobSpec, capsys: pytest.CaptureFixture[str]) -> None:
    run_job(spec, build=FakeBuild())
    assert not [name for name, data in objects(KEY).items() if SECRET.encode() in data]
    assert SECRET not in "".join(capsys.readouterr())


def test_killed_run_in_a_store_is_resumed(spec: JobSpec, tmp_path: Path, address: str) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path), OUT]
    done = subprocess.run(command, env=os.environ | environment(address), check=False)
    assert done.returncode == -9
    found = objects(KEY)
    kept = [
        row
        for name, data in found.items()
        if "/segments/" in name or name.startswith("data/")
        for row in pq.read_table(BytesIO(data))["row_id"].to_pylist()
    ]
    assert 0 < len(kept) < NUM_ROWS
    assert any("/in_flight/run-00001" in name for name in found), (
        "a log of rows in flight is stored"
    )
    assert json.loads(found["_batchinfer/lock.json"])["token"]
    second = TellingBuild()
    assert run(spec, second) is ExitCode.OK
    assert sorted(second.ran + kept) == list(range(NUM_ROWS)), "no finished row ran again"
    rows()
    assert verify(output_at(OUT)).problems == []
    lock = json.loads(objects(KEY)["_batchinfer/lock.json"])
    assert (lock["fence"], lock["token"]) == (2, None)


def test_run_with_a_lapsed_lock_commits_nothing(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_writer, "FLUSH_ROWS", 1)
    monkeypatch.setattr(object_lock, "_TRUSTED_S", 0.0)
    monkeypatch.setattr(object_lock, "LAPSE_S", -60.0)  # the next run takes over the lock
    first, left = FakeBuild(max_num_seqs=2), {}

    def be_passed(step: int) -> None:
        if step == 30:
            assert run(spec) is ExitCode.OK
            left.update(objects(KEY))

    first.before_step = be_passed
    with pytest.raises(LockedError, match="another run has taken over"):
        run(spec, first)
    assert objects(KEY) == left
    rows()
    assert run(spec) is ExitCode.OK


@pytest.mark.long
def test_late_segment_of_a_frozen_run_is_ignored_by_the_next_job(
    spec: JobSpec, tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_writer, "FLUSH_ROWS", 4)
    monkeypatch.setattr(pipeline, "BackgroundConsumer", AtOnce)
    monkeypatch.setattr(object_lock, "_TRUSTED_S", 0.0)
    monkeypatch.setattr(object_lock, "LAPSE_S", -60.0)  # the next run takes over the lock
    next_job = job(tmp_path, output={"path": OUT}, sampling={"max_tokens": 3})
    stopped = FakeBuild(max_num_seqs=4)
    late: list[str] = []

    def stop(step: int) -> None:
        if step == 1:
            raise StorageError("stopped")

    def freeze(request: Request) -> None:
        """Run the next job until it is stopped, while the first segment is being sent."""
        if request.method == "PUT" and "/segments/" in request.path and not late:
            late.append(request.path.rpartition("/")[2])
            with pytest.raises(StorageError, match="stopped"):
                run(next_job, stopped, overwrite=True)

    stopped.before_step = stop
    with between(address, freeze) as server:
        point_to(server, monkeypatch)
        with pytest.raises(LockedError, match="another run has taken over"):
            run(spec, FakeBuild(max_num_seqs=4))
    point_to(address, monkeypatch)
    assert late[0] in objects(f"{KEY}/_batchinfer/segments")
    assert run(next_job) is ExitCode.OK
    parts = objects(f"{KEY}/data").values()
    table = pa.concat_tables(pq.read_table(BytesIO(part)) for part in parts)
    assert table["generated_text"].to_pylist() == [p[:3] for p in table["prompt"].to_pylist()]
    assert late[0] not in objects(f"{KEY}/_batchinfer/segments")


@pytest.mark.parametrize("damage", ["changed", pytest.param("deleted", marks=pytest.mark.long)])
def test_damaged_part_in_a_store_is_made_again(spec: JobSpec, damage: str) -> None:
    run(spec)
    part = "data/part-00001.parquet"
    data = objects(KEY)[part]
    if damage == "deleted":
        obstore.delete(bucket(), f"{KEY}/{part}")
    else:
        change(part, bytes([*data[:40], data[40] ^ 1, *data[41:]]))
    assert verify(output_at(OUT)).problems
    assert run(spec) is ExitCode.OK
    rows()
    assert verify(output_at(OUT)).problems == []


def test_same_content_with_another_etag_is_kept(spec: JobSpec) -> None:
    """Copying a bucket changes the ETags of its objects."""
    run(spec)
    record = json.loads(objects(KEY)["_batchinfer/parts/part-00001.json"])
    change("_batchinfer/parts/part-00001.json", json.dumps({**record, "etag": '"other"'}).encode())
    again = FakeBuild()
    assert run(spec, again) is ExitCode.OK
    assert again.count == 0


def test_overwrite_in_a_store_deletes_old_output(spec: JobSpec, tmp_path: Path) -> None:
    run(spec)
    smaller = job(tmp_path, output={"path": OUT}, input={"limit": 15})
    with pytest.raises(LockedError, match="another job"):
        run(smaller)
    assert run(smaller, overwrite=True) is ExitCode.OK
    rows(15)
    assert sorted(objects(f"{KEY}/_batchinfer/parts")) == ["part-00000.json", "part-00001.json"]
    assert verify(output_at(OUT)).problems == []


def test_reuse_between_stores_and_folders(spec: JobSpec, tmp_path: Path) -> None:
    assert run(spec) is ExitCode.OK
    here, there = tmp_path / "here", f"{LAKE}/{KEY}/again"
    for path, reused in ((str(here), OUT), (there, str(here)), (str(here / "last"), there)):
        build = TellingBuild()
        again = job(tmp_path, output={"path": path, "reuse": [reused]}, input={"limit": 20})
        assert run(again, build) is ExitCode.OK
        assert build.ran == []
    with pytest.raises(UsageError, match="is the output of this job"):
        run(job(tmp_path, output={"path": OUT, "reuse": [OUT]}), overwrite=True)


# Stores that fail or refuse


@pytest.mark.long
def test_503_answers_are_retried(
    spec: JobSpec, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: Counter[str] = Counter()

    def storm(request: Request) -> int | None:
        """Answer only every third attempt of each request."""
        asked = f"{request.method} {request.path}"
        times[asked] += 1
        return 503 if times[asked] % 3 else None

    with between(address, storm) as stormy:
        point_to(stormy, monkeypatch)
        assert run(spec) is ExitCode.OK
        rows()


@pytest.mark.parametrize("status", [409, pytest.param(-409, marks=pytest.mark.long)])
def test_write_conflicts_are_retried(
    spec: JobSpec, address: str, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """The store refuses the write, or accepts it and reports a conflict."""
    met: set[str] = set()

    def meet(request: Request) -> int | None:
        path = request.path.partition("?")[0]
        if request.method != "PUT" or path in met or "/_batchinfer/probe" in path:
            return None
        met.add(path)
        return status

    with between(address, meet) as server:
        point_to(server, monkeypatch)
        assert run(spec) is ExitCode.OK
        rows()
    assert len(met) > 15


@pytest.mark.long
@pytest.mark.parametrize("status", [500, 503])
def test_failing_store_ends_the_run_and_keeps_rows(
    spec: JobSpec, address: str, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(part_writer, "FLUSH_ROWS", 4)
    monkeypatch.setattr(pipeline, "BackgroundConsumer", AtOnce)
    build, is_down = FakeBuild(max_num_seqs=4), [False]
    build.before_step = lambda step: is_down.__setitem__(0, step > 30)
    asked: list[str] = []

    def be_down(request: Request) -> int | None:
        if is_down[0]:
            asked.append(request.path)
        return status if is_down[0] else None

    with between(address, be_down) as server:
        point_to(server, monkeypatch)
        with pytest.raises(StorageError, match=rf"cannot write {OUT}/.*{status}") as caught:
            run(spec, build)
    assert len(str(caught.value).splitlines()) <= 2
    assert len(set(asked)) <= 3, "requests for the failed file, the lock and a log"
    point_to(address, monkeypatch)
    monkeypatch.setattr(object_lock, "LAPSE_S", -60.0)  # the run could not release its lock
    again = TellingBuild()
    assert run(spec, again) is ExitCode.OK
    assert 0 < len(again.ran) < NUM_ROWS
    rows()


def is_write(request: Request) -> bool:
    return request.method in ("PUT", "POST", "DELETE")


@pytest.mark.parametrize(
    "denied",
    [is_write, lambda request: "?delete" in request.path, lambda _: True],
    ids=["writing", "deleting", "all"],
)
def test_denied_access_is_found_before_the_model_loads(
    spec: JobSpec, address: str, monkeypatch: pytest.MonkeyPatch, denied: Callable[[Request], bool]
) -> None:
    build = FakeBuild()
    with between(address, lambda request: 403 if denied(request) else None) as server:
        point_to(server, monkeypatch)
        with pytest.raises(StorageError, match=rf"cannot (read|write) {OUT}/.*403") as caught:
            run(spec, build)
        assert build.count == 0
        assert SECRET not in str(caught.value)


def test_missing_bucket(tmp_path: Path, spec: JobSpec) -> None:
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/x/.*no such bucket"):
        run(job(tmp_path, output={"path": "s3://no-such-bucket/x"}))


def test_store_without_conditional_writes_is_refused(
    spec: JobSpec, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(request: Request) -> None:
        request.headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() != "if-none-match"
        }

    with between(address, forget) as server:
        point_to(server, monkeypatch)
        with pytest.raises(StorageError, match="ignores If-None-Match"):
            run(spec)


def test_status_and_verify_of_a_failing_store(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with complaining_server(503) as server:
        point_to(server, monkeypatch)
        for command in ("status", "verify"):
            found = CliRunner().invoke(app, [command, OUT])
            assert isinstance(found.exception, StorageError)


def test_missing_obstore_package_names_the_extra(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.connect.cache_clear()
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(UsageError) as caught:
        run(spec)
    assert str(caught.value) == f"{LAKE} needs the package obstore: {install_command('s3')}"


def test_partition_by_in_a_store(spec: JobSpec) -> None:
    output = spec.output.model_copy(update={"partition_by": ("status", "prompt")})
    by_prompt = spec.model_copy(update={"output": output})
    change("partitioned/mine.txt", b"mine")
    with pytest.raises(LockedError, match="was not written by batchinfer"):
        run(by_prompt)
    assert run(spec) is ExitCode.OK
    assert objects(f"{KEY}/partitioned") == {"mine.txt": b"mine"}
    obstore.delete(bucket(), f"{KEY}/partitioned/mine.txt")
    assert run(by_prompt) is ExitCode.OK
    found = objects(f"{KEY}/partitioned")
    assert len(found) == NUM_ROWS
    assert "status=ok/prompt=3 asks 3/part-00000.parquet" in found
    assert verify(output_at(OUT)).problems == []
    assert run(spec) is ExitCode.OK
    assert not objects(f"{KEY}/partitioned")
