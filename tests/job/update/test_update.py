"""Updates of outputs: which rows run again, and the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer.errors import DataError, DeviceError, ExitCode, LockedError
from batchinfer.job.claims.writers import Writer, own_lock
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.open import output_at
from batchinfer.job.output.verify import verify
from batchinfer.job.reuse.reuse import RowReuse
from batchinfer.job.run import decide, pipeline
from batchinfer.job.run.run_job import run_job
from batchinfer.job.stats.status import read_status
from batchinfer.job.storage.filesystem import parse_json
from tests.job.datasets import write_parquet
from tests.job.fakes import AtOnce, TellingBuild, drawn, echo, job
from tests.job.output.test_resume import stop_at

ROWS = [f"{row} asks" for row in range(14)]
DRAWN = {"sampling": {"max_tokens": 6, "temperature": 1.0}}


class Place:
    """A folder with a job and the files that it reads."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        self.folder = folder
        self.sections = sections
        self.next_token = drawn if "sampling" in sections else echo

    def write(self, *texts: str, name: str = "x.parquet") -> None:
        write_parquet(self.folder / "in" / name, {"prompt": list(texts)})

    def run(self, expected: ExitCode = ExitCode.OK, **options: Any) -> list[int]:
        """Run the job; return the rows that the engine ran, sorted."""
        build = TellingBuild(next_token=self.next_token)
        code = run_job(self.spec(), build=build, quiet=True, **options)
        assert code is expected
        return sorted(build.ran)

    def stop(self, step: int, **options: Any) -> list[int]:
        """Run the job and stop it at a step; return the rows that the engine ran, sorted."""
        build = TellingBuild(max_num_seqs=4, next_token=self.next_token)
        build.before_step = stop_at(step)
        assert run_job(self.spec(), build=build, quiet=True, **options) is ExitCode.INTERRUPTED
        return sorted(build.ran)

    def spec(self, out: str = "out") -> Any:
        output = {"path": str(self.folder / out), "rows_per_part": 4}
        sections = {**self.sections, "output": {**output, **self.sections.get("output", {})}}
        return job(self.folder, **sections)

    @property
    def out(self) -> OutputDir:
        return OutputDir(self.folder / "out")

    def rows(self) -> list[dict[str, Any]]:
        parts = sorted((self.folder / "out" / "data").iterdir())
        return [row for part in parts for row in pq.read_table(part).to_pylist()]

    def check_as_fresh(self) -> None:
        """Check that the output equals that of a single run into another folder."""
        build = TellingBuild(next_token=self.next_token)
        run_job(self.spec("fresh"), build=build, quiet=True)
        fresh, here = (self.folder / out / "data" for out in ("fresh", "out"))
        assert {p.name: p.read_bytes() for p in fresh.iterdir()} == {
            p.name: p.read_bytes() for p in here.iterdir()
        }
        found = verify(self.out)
        assert found.problems == []
        assert not (self.folder / "out" / "_batchinfer" / "next").exists()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return a finished job."""
    found = Place(tmp_path)
    found.write(*ROWS)
    assert found.run() == list(range(14))
    return found


def test_update_runs_only_appended_rows(place: Place) -> None:
    place.write(*ROWS, "more", "still more")
    assert place.run(update=True) == [14, 15]
    place.check_as_fresh()
    assert place.run(update=True) == [], "nothing to do"
    reused = parse_json(place.out.summary.read_bytes())["rows"]["reused"]
    assert reused == 14


def test_update_runs_moved_rows_with_sampling_again(tmp_path: Path) -> None:
    place = Place(tmp_path, **DRAWN)
    place.write(*ROWS)
    place.run()
    place.write(*ROWS[:5], "new", *ROWS[5:])
    assert place.run(update=True) == list(range(5, 15))
    place.check_as_fresh()


def test_update_of_parts_and_columns_runs_no_rows(place: Place) -> None:
    place.sections = {"output": {"rows_per_part": 5}, "input": {"keep_columns": []}}
    assert place.run(update=True) == []
    place.check_as_fresh()


def test_update_with_another_max_tokens_runs_all_rows(place: Place) -> None:
    place.sections = {"sampling": {"max_tokens": 3}}
    assert place.run(update=True) == list(range(14))
    place.check_as_fresh()


def test_update_without_output_runs_all_rows(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.write(*ROWS)
    assert place.run(update=True) == list(range(14))
    place.check_as_fresh()


def test_update_reuses_rows_of_an_unfinished_output(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.write(*ROWS)
    place.stop(8)
    kept = finished_rows(place.out)
    assert kept
    place.write(*ROWS, "new")
    assert place.run(update=True) == sorted({*range(15)} - kept)
    place.check_as_fresh()


def test_update_looks_at_all_rows_if_image_files_may_have_changed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output of ``place`` has no facts about image files, as if an older version wrote it."""
    facts = ["one"]
    monkeypatch.setattr(decide, "image_file_facts", lambda spec, source: facts[0])

    def is_replaced() -> bool:
        before = place.out.files.stat(place.out.summary)
        assert place.run(update=True) == [], "all rows are as before"
        return before != place.out.files.stat(place.out.summary)

    assert [is_replaced(), is_replaced()] == [True, False]
    facts[0] = "two"
    assert place.run() == []
    assert [is_replaced(), is_replaced()] == [True, False]
    place.check_as_fresh()


@pytest.mark.parametrize("update", [False, True])
def test_stopped_update_of_image_files_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: bool
) -> None:
    facts = ["one"]
    monkeypatch.setattr(decide, "image_file_facts", lambda spec, source: facts[0])
    place = Place(tmp_path)
    place.write(*ROWS)
    place.run()
    facts[0] = "two"
    with monkeypatch.context() as patched:
        patched.setattr(RowReuse, "without_found", lambda self, batches, *_: batches)
        place.stop(8, update=True)
    (generation,) = place.out.files.entries(place.out.next)
    assert finished_rows(place.out.generation(generation.name))
    assert place.run(update=update) == []
    assert not place.out.files.entries(place.out.next)
    assert place.run(update=True) == []


def stopped_with_image_facts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, facts: list[str | None]
) -> tuple[Place, set[int]]:
    """Stop a job whose image files have the facts in a list, which a test may change. Return the
    job and its finished rows."""
    monkeypatch.setattr(decide, "image_file_facts", lambda spec, source: facts[0])
    place = Place(folder)
    place.write(*ROWS)
    place.stop(8)
    kept = finished_rows(place.out)
    assert kept
    return place, kept


def test_images_that_changed_before_a_resume_need_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts: list[str | None] = ["one"]
    place, kept = stopped_with_image_facts(tmp_path, monkeypatch, facts)
    facts[0] = "two"
    match = r"(?s)image files that rows name .*--update .*--retry-errors"
    with pytest.raises(DataError, match=match):
        place.run()
    assert finished_rows(place.out) == kept
    assert place.run(update=True) == sorted({*range(14)} - kept)
    place.check_as_fresh()
    facts[0] = "three"
    assert place.run() == [], "a finished job does not compare images"


@pytest.mark.parametrize(
    ("facts", "options"),
    [
        pytest.param("one", {}, id="same"),
        pytest.param(None, {}, id="unknown"),
        pytest.param("two", {"retry_errors": True}, id="retry-errors"),
    ],
)
def test_resumes_that_accept_the_image_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: str | None, options: dict[str, bool]
) -> None:
    found: list[str | None] = ["one"]
    place, kept = stopped_with_image_facts(tmp_path, monkeypatch, found)
    found[0] = facts
    assert place.run(**options) == sorted({*range(14)} - kept)


def finished_rows(out: OutputDir) -> set[int]:
    tables = [*out.files.entries(out.segments), *out.files.entries(out.data)]
    return {row for path in tables for row in pq.read_table(path)["row_id"].to_pylist()}


@pytest.mark.parametrize("update", [False, True])
def test_stopped_update_is_resumed(tmp_path: Path, update: bool) -> None:
    place = Place(tmp_path)
    place.write(*ROWS)
    place.run()
    before = place.rows()
    place.sections = {"sampling": {"max_tokens": 5}}
    place.stop(8, update=True)
    assert place.rows() == before
    assert place.out.files.stat(place.out.success) is not None, "readers find the old output"
    (generation,) = place.out.files.entries(place.out.next)
    kept = finished_rows(place.out.generation(generation.name))
    assert kept
    found = read_status(place.out, 0.0)
    assert (found.state, found.rows_done) == ("finished", 14)
    assert (found.update.rows_done, found.update.rows_total) == (len(kept), 14)
    assert any("of the update" in line for line in found.lines())
    assert any("an update has started" in line for line in verify(place.out).lines())
    assert place.run(update=update) == sorted({*range(14)} - kept)
    place.check_as_fresh()
    assert read_status(place.out, 0.0).update is None


def test_update_is_refused_while_a_worker_of_a_killed_launcher_lives(place: Place) -> None:
    place.write(*ROWS, *(f"{row} more" for row in range(9)))
    place.stop(8, update=True)
    (generation,) = place.out.files.entries(place.out.next)
    worker = own_lock(output_at(str(generation)), Writer(number=1))
    worker.files.make_directory(worker.locks)
    with worker.lock.held(), pytest.raises(LockedError, match="worker 1 is writing to"):
        place.run(update=True)
    assert place.run(update=True)
    place.check_as_fresh()


@pytest.mark.long
def test_update_reuses_rows_of_an_unfinished_update(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "BackgroundConsumer", AtOnce)  # the update copies rows first
    place.write(*ROWS, *(f"{row} more" for row in range(9)))
    place.stop(8, update=True)
    (generation,) = place.out.files.entries(place.out.next)
    kept = finished_rows(place.out.generation(generation.name))
    assert kept - {*range(14)}
    place.write(*ROWS, *(f"{row} more" for row in range(9)), "last")
    assert place.run(update=True) == sorted({*range(14, 24)} - kept)
    place.check_as_fresh()


@pytest.mark.long
def test_updates_without_rows_are_deleted(place: Place) -> None:

    def fail(*_: object, **__: object) -> None:
        raise DeviceError("no device")

    def begin(max_tokens: int) -> None:
        place.sections = {"sampling": {"max_tokens": max_tokens}}
        with pytest.raises(DeviceError):
            run_job(place.spec(), build=fail, quiet=True, update=True)

    begin(5)
    place.sections = {"sampling": {"max_tokens": 4}}
    place.stop(8, update=True)
    (kept,) = place.out.files.entries(place.out.next)
    begin(3)
    begin(2)
    assert kept in place.out.files.entries(place.out.next), (
        "a generation with finished rows is kept"
    )
    assert len(place.out.files.entries(place.out.next)) == 2


def test_return_to_the_old_job_keeps_its_output(place: Place) -> None:
    place.write(*ROWS, *(f"{row} more" for row in range(9)))
    place.stop(8, update=True)
    place.write(*ROWS)
    assert place.run() == []
    assert place.out.files.entries(place.out.next), "the unfinished generation is kept"
    (generation,) = place.out.files.entries(place.out.next)
    worker = own_lock(output_at(str(generation)), Writer(number=1))
    worker.files.make_directory(worker.locks)
    with worker.lock.held(), pytest.raises(LockedError, match="worker 1 is writing to"):
        place.run(update=True)
    assert place.out.files.entries(place.out.next), "a worker still writes to it"
    assert place.run(update=True) == []
    assert not place.out.files.entries(place.out.next)


def test_update_with_too_many_errors_keeps_successful_output(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    before = place.rows()
    place.write(*ROWS[:5], "", *ROWS[6:])
    assert place.run(ExitCode.TOO_MANY_ROW_ERRORS, update=True) == []
    assert place.rows() == before
    stderr = capsys.readouterr().err
    assert (
        "out keeps its old rows, because the update ended without _SUCCESS; the new rows are in"
        in stderr
    )
    assert place.run(ExitCode.TOO_MANY_ROW_ERRORS) == []
    place.write(*ROWS[:5], "corrected", *ROWS[6:])
    assert place.run(update=True) == [5]
    place.check_as_fresh()


def test_update_replaces_failed_output(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.write("", "", *ROWS)
    place.run(ExitCode.TOO_MANY_ROW_ERRORS)
    place.write("", "corrected", *ROWS)
    assert place.run(ExitCode.TOO_MANY_ROW_ERRORS, retry_errors=True) == [1]
    assert [row["status"] for row in place.rows()] == ["error", *["ok"] * 15]
    assert place.run(ExitCode.TOO_MANY_ROW_ERRORS) == []


def test_retry_errors_refuses_fewer_rows(place: Place) -> None:
    place.write(*ROWS[:5])
    with pytest.raises(DataError, match=r"x\.parquet has different content\nuse --update"):
        place.run(retry_errors=True)


def test_update_without_empty_folders(place: Place) -> None:
    """Tools that copy only files lose empty folders."""
    for folder in sorted((place.folder / "out").rglob("*"), reverse=True):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    place.write(*ROWS, "more")
    assert place.run(update=True) == [14]
    place.check_as_fresh()


def values_in(folder: Path) -> set[str]:
    return {path.name for path in (folder / "out" / "partitioned").iterdir()}


def test_update_replaces_partitioned_files(tmp_path: Path) -> None:
    place = Place(tmp_path, output={"partition_by": ["prompt"]})
    place.write("a", "b")
    assert place.run() == [0, 1]
    assert values_in(tmp_path) == {"prompt=a", "prompt=b"}
    place.write("a", "c")
    assert place.run(update=True) == [1]
    assert values_in(tmp_path) == {"prompt=a", "prompt=c"}
    assert verify(place.out).problems == []
    assert place.run(update=True) == []
    del place.sections["output"]
    assert place.run(update=True) == []
    assert not (tmp_path / "out" / "partitioned").exists()
