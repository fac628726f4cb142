"""Several shards of a job that run at the same time, with real files, locks and processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer.errors import DataError, ExitCode, LockedError, UsageError
from batchinfer.job.claims import writers
from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.shared_claim import Role, SharedClaim
from batchinfer.job.input.dataset import open_source
from batchinfer.job.job import identified, open_job
from batchinfer.job.output import part_writer
from batchinfer.job.output.open import output_at
from batchinfer.job.output.verify import verify
from batchinfer.job.run import finish_job, pipeline
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.storage.failpoints import VARIABLE
from tests.job.claims.jobs import NUM_ROWS, check_finished, data, out_of
from tests.job.datasets import write_parquet
from tests.job.fakes import AtOnce, FakeBuild, TellingBuild, job

COUNT = 4


def run_shard(
    spec: JobSpec, index: int, count: int = COUNT, build: FakeBuild | None = None, **options: Any
) -> ExitCode:
    options = {"quiet": True, **options}
    return run_job(spec, role=Role(Shard(index, count)), build=build or FakeBuild(), **options)


@contextmanager
def living(spec: JobSpec, index: int, count: int = COUNT) -> Iterator[None]:
    """Hold the claim of another shard."""
    shard = SharedClaim(output_at(spec.output.path), Role(Shard(index, count)), 1 << 16)
    manifest = open_job(spec, identified(open_source(spec.input.paths), None)).manifest
    with shard.begun(manifest, spec.output.if_exists):
        yield


def die_at(step: int) -> FakeBuild:
    """Build an engine that dies at a step."""
    build = FakeBuild(max_num_seqs=4)

    def before_step(at: int) -> None:
        if at == step:
            raise KeyboardInterrupt

    build.before_step = before_step
    return build


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_writer, "FLUSH_ROWS", 1)
    monkeypatch.setattr(pipeline, "BackgroundConsumer", AtOnce)


def test_shards_write_the_bytes_of_a_single_run(
    spec: JobSpec, plain: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    for index, left in ((2, 6), (0, 4), (3, 2)):
        assert run_shard(spec, index, quiet=False) is ExitCode.OK
        assert f"other processes still have {left} parts" in capsys.readouterr().out
        assert not (out_of(spec) / "_SUCCESS").exists()
    assert run_shard(spec, 1) is ExitCode.OK
    check_finished(spec, plain)
    again = FakeBuild()
    assert run_shard(spec, 2, build=again) is ExitCode.OK
    assert run_job(spec, build=again, quiet=True) is ExitCode.OK
    assert again.count == 0, "nothing is left to do"


def test_shard_without_parts_has_nothing_to_do(
    spec: JobSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Shard(0, 9).parts(8) == range(0)
    assert run_shard(spec, 0, 9, quiet=False, overwrite=True) is ExitCode.OK
    assert capsys.readouterr().out == "shard 0/9 has nothing to do: the job has only 8 parts\n"
    assert not out_of(spec).exists()


def processes(
    spec: JobSpec, *shards: str, failpoint: str = "", options: Sequence[str] = ()
) -> list[subprocess.CompletedProcess[str]]:
    """Run shards at the same time, each in its own process; only the first has the failpoint."""
    program = [sys.executable, "-m", "tests.job.claims.program", str(out_of(spec).parent)]
    started = [
        subprocess.Popen(
            [*program, shard, *options],
            env={**os.environ, VARIABLE: "" if at else failpoint},
            stderr=subprocess.PIPE,
            text=True,
        )
        for at, shard in enumerate(shards)
    ]
    errors = [process.communicate()[1] for process in started]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, "", error)
        for process, error in zip(started, errors, strict=True)
    ]


@pytest.mark.long
def test_killed_shard_among_four_is_resumed(spec: JobSpec, plain: dict[str, bytes]) -> None:
    ended = processes(spec, "1/4", "0/4", "2/4", "3/4", failpoint="segments-durable:3")
    assert [process.returncode for process in ended] == [-signal.SIGKILL, 0, 0, 0]
    assert not (out_of(spec) / "_SUCCESS").exists()
    found = verify(output_at(spec.output.path))
    assert (found.parts_done, found.problems, found.complete) == (6, [], False)
    assert processes(spec, "1/4")[0].returncode == 0
    check_finished(spec, plain)


@pytest.mark.long
@pytest.mark.parametrize("failpoint", ["out-staged:1", "out-durable:1", "stats-renamed:2"])
def test_shard_killed_while_ending_the_job_leaves_that_to_another(
    spec: JobSpec, plain: dict[str, bytes], failpoint: str
) -> None:
    assert run_shard(spec, 0, 2) is ExitCode.OK
    assert processes(spec, "1/2", failpoint=failpoint)[0].returncode == -signal.SIGKILL
    assert not (out_of(spec) / "_SUCCESS").exists()
    build = FakeBuild()
    assert run_shard(spec, 0, 2, build=build) is ExitCode.OK
    assert build.count == 0
    check_finished(spec, plain)


def test_one_of_two_shards_that_finish_together_ends_the_job(
    spec: JobSpec, plain: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, finish, ending = threading.Barrier(2), finish_job._finish, SharedClaim.ending
    finishes: list[str] = []

    def ending_together(claim: SharedClaim, is_over: Callable[[], bool]) -> Any:
        both.wait()
        return ending(claim, is_over)

    def counted(*arguments: Any) -> ExitCode:
        finishes.append("once")
        return finish(*arguments)

    monkeypatch.setattr(SharedClaim, "ending", ending_together)
    monkeypatch.setattr(finish_job, "_finish", counted)
    codes: list[ExitCode] = []
    threads = [
        threading.Thread(target=lambda at=at: codes.append(run_shard(spec, at, 2)))
        for at in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (codes, finishes) == ([ExitCode.OK] * 2, ["once"])
    check_finished(spec, plain)


def test_same_shard_is_refused_while_it_runs(spec: JobSpec) -> None:
    with living(spec, 1), pytest.raises(LockedError, match=r"is writing to .*: shard 1/4, process"):
        run_shard(spec, 1)


def test_single_run_is_refused_while_a_shard_lives(spec: JobSpec, plain: dict[str, bytes]) -> None:
    with living(spec, 1):
        with pytest.raises(LockedError, match=r"shard 1/4 is writing to .*\nwait until"):
            run_job(spec, build=FakeBuild(), quiet=True)
        assert run_shard(spec, 0) is ExitCode.OK, "siblings may run"
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    check_finished(spec, plain)


def test_shard_is_refused_while_a_single_run_lives(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "ALONE_PATIENCE_S", 0.0)
    refused = pytest.raises(LockedError, match=r"another run is writing to .*: process \d+")
    with output_at(spec.output.path).locked(), refused:
        run_shard(spec, 0)


def test_shard_waits_for_a_sibling_that_holds_the_directory_lock(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "ALONE_PATIENCE_S", 0.0)
    asked = threading.Event()
    held = writers.wait_for

    def tell(*arguments: Any, **options: Any) -> Any:
        asked.set()
        return held(*arguments, **options)

    monkeypatch.setattr("batchinfer.job.claims.shared_claim.wait_for", tell)
    waiting = output_at(spec.output.path).under_lock("lock", "shard 3/4")
    codes: list[ExitCode] = []
    thread = threading.Thread(target=lambda: codes.append(run_shard(spec, 0)))
    with waiting.locked():
        thread.start()
        assert asked.wait(60)
    thread.join()
    assert codes == [ExitCode.OK]


def test_other_shard_count_is_refused_while_a_shard_lives(
    spec: JobSpec, plain: dict[str, bytes]
) -> None:
    with living(spec, 1), pytest.raises(LockedError, match=r"shard 1/4 is writing to"):
        run_shard(spec, 0, 2)
    assert run_shard(spec, 1) is ExitCode.OK
    for index in range(3):
        assert run_shard(spec, index, 3) is ExitCode.OK
    check_finished(spec, plain)


def kept(spec: JobSpec) -> set[int]:
    """Return the rows in parts and segments."""
    state = out_of(spec) / "_batchinfer"
    parts = [int(path.stem[-5:]) for path in (state / "parts").iterdir()]
    rows = {row for part in parts for row in range(part * 10, min(part * 10 + 10, NUM_ROWS))}
    for path in (state / "segments").iterdir():
        rows |= set(pq.read_table(path)["row_id"].to_pylist())
    return rows


Again = Callable[[JobSpec, FakeBuild], None]


def by_one_run(spec: JobSpec, build: FakeBuild) -> None:
    assert run_job(spec, build=build, quiet=True) is ExitCode.OK


def by_shards_of(count: int) -> Again:
    def run_all(spec: JobSpec, build: FakeBuild) -> None:
        for index in range(count):
            assert run_shard(spec, index, count, build) is ExitCode.OK

    return run_all


@pytest.mark.parametrize("again", [by_one_run, by_shards_of(3), by_shards_of(1)])
@pytest.mark.usefixtures("row_by_row")
def test_later_runs_resume_rows_of_killed_shards(
    spec: JobSpec, plain: dict[str, bytes], again: Again
) -> None:
    for index, step in ((0, 12), (1, 30), (3, 12)):
        with pytest.raises(KeyboardInterrupt):
            run_shard(spec, index, build=die_at(step))
    before = kept(spec)
    names = [path.name for path in (out_of(spec) / "_batchinfer" / "segments").iterdir()]
    assert {name.split("-")[2] for name in names} == {f"s{at:04d}of4" for at in (0, 1, 3)}
    build = TellingBuild(max_num_seqs=4)
    again(spec, build)
    assert not before & set(build.ran)
    assert len(build.ran) == len(set(build.ran))
    check_finished(spec, plain)


@pytest.mark.usefixtures("row_by_row")
def test_shards_resume_rows_of_a_killed_single_run(spec: JobSpec, plain: dict[str, bytes]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_job(spec, build=die_at(40), quiet=True)
    before, build = kept(spec), TellingBuild(max_num_seqs=4)
    assert before
    by_shards_of(4)(spec, build)
    assert not before & set(build.ran)
    check_finished(spec, plain)


def test_shard_makes_its_damaged_part_again(spec: JobSpec, plain: dict[str, bytes]) -> None:
    for index in (0, 1):
        run_shard(spec, index)
    part = out_of(spec) / "data" / "part-00003.parquet"
    part.write_bytes(part.read_bytes()[:-5])
    with living(spec, 1):
        for index in (2, 3):
            run_shard(spec, index)
        assert not (out_of(spec) / "_SUCCESS").exists(), "the damaged part has no record"
    assert run_shard(spec, 1) is ExitCode.OK
    check_finished(spec, plain)


def test_damaged_part_of_another_shard_names_the_shard_to_run(
    spec: JobSpec, plain: dict[str, bytes]
) -> None:
    by_shards_of(4)(spec, FakeBuild())
    part = out_of(spec) / "data" / "part-00003.parquet"
    part.write_bytes(part.read_bytes()[:-5])
    with pytest.raises(
        DataError,
        match=r"part-00003.*\nto make the part again, run the job with --shard 1/4 or without",
    ):
        run_shard(spec, 2)
    assert run_shard(spec, 1) is ExitCode.OK
    check_finished(spec, plain)


def test_shard_that_waits_to_end_the_job_can_be_stopped(
    spec: JobSpec, plain: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = SharedClaim.ending

    def ending_beside_another(claim: SharedClaim, is_over: Callable[[], bool]) -> Any:
        stack = ExitStack()
        stack.enter_context(claim.shared.lock.held())
        timer = threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGTERM))
        stack.callback(timer.join)
        timer.start()
        with stack:
            yield stack.enter_context(ending(claim, is_over))

    monkeypatch.setattr(SharedClaim, "ending", contextmanager(ending_beside_another))
    assert run_shard(spec, 0) is ExitCode.INTERRUPTED
    monkeypatch.undo()
    by_shards_of(4)(spec, FakeBuild())
    check_finished(spec, plain)


def test_overwriting_shards_delete_old_output_once(
    spec: JobSpec, plain: dict[str, bytes], tmp_path: Path
) -> None:
    old = job(tmp_path, sampling={"max_tokens": 7})
    run_job(old, build=FakeBuild(), quiet=True)
    assert run_shard(spec, 0, overwrite=True) is ExitCode.OK
    assert len(data(spec)) == 2, "the old parts are deleted"
    for index in (1, 2, 2):
        assert run_shard(spec, index, overwrite=True) is ExitCode.OK
    assert len(data(spec)) == 6
    assert run_shard(spec, 3, overwrite=True) is ExitCode.OK
    check_finished(spec, plain)
    assert run_shard(spec, 3, overwrite=True) is ExitCode.OK
    assert len(data(spec)) == 2, "a finished job starts over"


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2, 4])
def test_killed_overwriting_shard_leaves_the_deletion_to_another(
    spec: JobSpec, plain: dict[str, bytes], tmp_path: Path, times: int
) -> None:
    """Kill the shard while it records its start, a copy of its plan, or the end of the deletion."""
    run_job(job(tmp_path, sampling={"max_tokens": 7}), build=FakeBuild(), quiet=True)
    failpoint, options = f"_batchinfer-renamed:{times}", ["if_exists=overwrite"]
    ended = processes(spec, "1/2", failpoint=failpoint, options=options)
    assert [process.returncode for process in ended] == [-signal.SIGKILL]
    for index in (0, 1):
        assert run_shard(spec, index, 2, overwrite=True) is ExitCode.OK
    check_finished(spec, plain)


def test_output_stays_until_an_overwriting_shard_has_loaded_its_model(spec: JobSpec) -> None:
    run_job(spec, build=FakeBuild(), quiet=True)
    before = data(spec)

    def fail(*arguments: object, **options: object) -> Any:
        with living(spec.model_copy(update={"output": overwrites}), 1):
            pass  # a sibling begins at the same time
        raise UsageError("no model")

    overwrites = spec.output.model_copy(update={"if_exists": "overwrite"})
    with pytest.raises(UsageError):
        run_job(spec, role=Role(Shard(0, 4)), overwrite=True, build=fail, quiet=True)
    assert data(spec) == before
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK


def test_shards_that_overwrite_together_share_a_plan(
    spec: JobSpec, plain: dict[str, bytes]
) -> None:
    run_job(spec, build=FakeBuild(), quiet=True)
    inner = FakeBuild()

    class Outer(FakeBuild):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            run_shard(spec, 1, 2, build=inner, overwrite=True)  # begins later, but deletes first
            return super().__call__(*arguments, **options)

    assert run_shard(spec, 0, 2, build=Outer(), overwrite=True) is ExitCode.OK
    check_finished(spec, plain)


def test_overwriting_and_resuming_shards_refuse_each_other(spec: JobSpec, tmp_path: Path) -> None:
    overwrites = spec.model_copy(
        update={"output": spec.output.model_copy(update={"if_exists": "overwrite"})}
    )
    run_shard(spec, 0)
    with (
        living(spec, 1),
        pytest.raises(LockedError, match="other writers were started without it"),
    ):
        run_shard(spec, 2, overwrite=True)
    with living(overwrites, 1), pytest.raises(LockedError, match="are about to start over"):
        run_shard(spec, 2)
    assert run_shard(spec, 2) is ExitCode.OK, "the shard that was about to start over has died"
    assert len(data(spec)) == 4


def test_if_exists_error_admits_later_shards(spec: JobSpec, plain: dict[str, bytes]) -> None:
    careful = spec.model_copy(
        update={"output": spec.output.model_copy(update={"if_exists": "error"})}
    )
    by_shards_of(4)(careful, FakeBuild())
    check_finished(spec, plain)
    (out_of(spec) / "_SUCCESS").unlink()
    with pytest.raises(LockedError, match="already holds output"):
        run_shard(careful, 0, 2)


def test_other_job_is_refused_while_shards_live_and_after_rows_are_finished(
    spec: JobSpec, tmp_path: Path
) -> None:
    other = job(tmp_path, sampling={"max_tokens": 7})
    with living(spec, 1), pytest.raises(LockedError, match="started another job"):
        run_shard(other, 0)
    run_shard(spec, 1)
    with pytest.raises(LockedError, match=r"sampling\.max_tokens was 8 and is now 7"):
        run_shard(other, 0)


def test_shards_find_duplicate_ids_among_all_rows(tmp_path: Path) -> None:
    rows = {"prompt": ["a"] * 40, "id": [*range(38), 3, None]}
    write_parquet(tmp_path / "in" / "x.parquet", rows)
    spec = job(tmp_path, input={"id_column": "id"}, errors={"max_error_rate": 0.1})
    for index in range(2):
        assert run_shard(spec, index, 2) is ExitCode.OK
    table = pq.read_table(sorted((tmp_path / "out" / "data").iterdir()))
    codes = [error and error["code"] for error in table["error"].to_pylist()]
    assert codes == [*[None] * 38, "duplicate_id", "missing_id"]


def test_last_shard_reports_too_many_errors(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["", *("a" for _ in range(39))]})
    spec = job(tmp_path)
    assert run_shard(spec, 0, 2) is ExitCode.OK, "the shard with the bad row cannot know the total"
    assert run_shard(spec, 1, 2) is ExitCode.TOO_MANY_ROW_ERRORS
    assert run_shard(spec, 0, 2) is ExitCode.TOO_MANY_ROW_ERRORS
