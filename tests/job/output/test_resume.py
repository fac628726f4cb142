"""Jobs that stop, fail or die and are resumed; the engine answers with the prompt."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import DeviceError, ExitCode, StorageError
from batchinfer.job.output import part_writer
from batchinfer.job.run import pipeline
from batchinfer.job.run.run_job import run_job
from batchinfer.job.storage.filesystem import LocalFiles
from tests.job.datasets import flip_bit, write_parquet
from tests.job.fakes import AtOnce, FakeBuild, TellingBuild, job

NUM_ROWS = 40
ONE_PART = {"rows_per_part": 100}


def prompts(tmp_path: Path, bad: tuple[int, ...] = ()) -> list[str]:
    """Write prompts; every fifth row has the same one, and the rows ``bad`` have empty ones."""
    texts = [f"{row if row % 5 else 'x'} asks" for row in range(NUM_ROWS)]
    for row in bad:
        texts[row] = ""
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": texts})
    return texts


class Build(TellingBuild):
    """Builds engines that record the rows they run, and call ``before_step``."""

    def __init__(self, before_step: Callable[[int], None] = lambda step: None) -> None:
        super().__init__(max_num_seqs=4)
        self.before_step = before_step


def stop_at(step: int) -> Callable[[int], None]:
    return lambda at: os.kill(os.getpid(), signal.SIGTERM) if at == step else None


def fail_at(step: int, error: BaseException) -> Callable[[int], None]:
    def before_step(at: int) -> None:
        if at == step:
            raise error

    return before_step


def table(tmp_path: Path) -> pa.Table:
    return pq.read_table(sorted((tmp_path / "out" / "data").iterdir()))


def on_disk(tmp_path: Path) -> list[int]:
    """Return the ids of the rows in segments."""
    paths = sorted((tmp_path / "out" / "_batchinfer" / "segments").iterdir())
    return sorted(row for path in paths for row in pq.read_table(path)["row_id"].to_pylist())


def check_answers(tmp_path: Path, texts: list[str]) -> None:
    found = table(tmp_path)
    assert found["row_id"].to_pylist() == list(range(NUM_ROWS))
    assert found["generated_text"].to_pylist() == [text[:8] or None for text in texts]
    assert on_disk(tmp_path) == []


def check_sums(tmp_path: Path) -> None:
    """Check the equations between token counts that ``docs/output.md`` promises."""
    out = tmp_path / "out"
    tokens = json.loads((out / "summary.json").read_bytes())["tokens"]
    prefill = pc.sum(pq.read_table(out / "stats" / "steps.parquet")["prefill_tokens"]).as_py()
    assert prefill == tokens["prompt_computed"] + tokens["recomputed"]
    assert tokens["prompt"] == tokens["prompt_computed"] + tokens["prompt_cached"]
    for name in ("prompt", "output"):
        assert tokens[name] == pc.sum(table(tmp_path)[f"num_{name}_tokens"]).as_py()


@pytest.mark.parametrize(
    ("error", "order", "every_steps"),
    [
        *((None, "input", 1), (None, "prefix", 7)),
        *((RuntimeError("bug"), "prefix", 7), (DeviceError("the device is gone"), "input", 7)),
    ],
)
def test_finished_rows_of_an_ended_run_do_not_run_again(
    tmp_path: Path, error: Exception | None, order: str, every_steps: int
) -> None:
    texts = prompts(tmp_path)
    spec = job(
        tmp_path, output=ONE_PART, engine={"order": order}, stats={"every_steps": every_steps}
    )
    if error is None:
        assert run_job(spec, build=Build(stop_at(40)), quiet=True) is ExitCode.INTERRUPTED
    else:
        with pytest.raises(type(error)):
            run_job(spec, build=Build(fail_at(40, error)), quiet=True)
    kept = on_disk(tmp_path)
    assert 0 < len(kept) < NUM_ROWS
    second = Build()
    assert run_job(spec, build=second, quiet=True) is ExitCode.OK
    assert not set(kept) & set(second.ran)
    assert len(set(second.ran)) == len(second.ran)
    left = {texts[row] for row in range(NUM_ROWS)} - {texts[row] for row in kept}
    assert {texts[row] for row in second.ran} >= left
    check_answers(tmp_path, texts)
    check_sums(tmp_path)


def test_steps_of_a_killed_run_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = prompts(tmp_path)
    monkeypatch.setattr(part_writer, "FLUSH_ROWS", 1)
    monkeypatch.setattr(pipeline, "BackgroundConsumer", AtOnce)
    killed = tmp_path / "killed"

    def look(step: int) -> None:
        if step == 40:  # the files that kill -9 would leave
            shutil.copytree(tmp_path / "out", killed)

    spec = job(tmp_path, output=ONE_PART, stats={"every_steps": 1000})
    run_job(spec, build=Build(look), quiet=True)
    shutil.rmtree(tmp_path / "out")
    killed.rename(tmp_path / "out")
    assert on_disk(tmp_path)
    assert run_job(spec, build=Build(), quiet=True) is ExitCode.OK
    check_answers(tmp_path, texts)
    check_sums(tmp_path)
    runs = pq.read_table(tmp_path / "out" / "stats" / "steps.parquet")["run_id"].to_pylist()
    assert sorted(runs) == ["run-00001", "run-00002"]


def test_part_with_all_rows_in_segments_needs_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = prompts(tmp_path)
    rename = LocalFiles.rename

    def refuse(self: LocalFiles, source: Path, target: Path) -> None:
        if target.parent.name == "data":
            raise OSError(28, "No space left on device")
        rename(self, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "rename", refuse)
        with pytest.raises(StorageError, match="finished rows are kept"):
            run_job(job(tmp_path, output=ONE_PART), build=Build(), quiet=True)
    assert on_disk(tmp_path) == list(range(NUM_ROWS))
    second = Build()
    assert run_job(job(tmp_path, output=ONE_PART), build=second, quiet=True) is ExitCode.OK
    assert second.count == 0
    check_answers(tmp_path, texts)
    check_sums(tmp_path)
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert summary["kv"]["num_blocks"] == 128


def test_rows_of_a_damaged_segment_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = prompts(tmp_path)
    run_job(job(tmp_path, output=ONE_PART), build=Build(stop_at(40)), quiet=True)
    [segment] = (tmp_path / "out" / "_batchinfer" / "segments").iterdir()
    flip_bit(segment, 60)
    capsys.readouterr()
    assert run_job(job(tmp_path, output=ONE_PART), build=Build()) is ExitCode.OK
    assert f"rewriting the rows of {segment.name}" in capsys.readouterr().err
    check_answers(tmp_path, texts)


class Model(Build):
    """Builds engines that answer with the prompt, but refuse the given rows."""

    def __init__(self, *rows: int) -> None:
        super().__init__()
        self.rows = rows

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        built = super().__call__(*arguments, **options)
        refusal = built.engine.refusal

        def refuse(request: Any) -> tuple[str, str] | None:
            bad = request.row_id in self.rows
            return ("does_not_fit", "not today") if bad else refusal(request)

        built.engine.refusal = refuse
        return built


@pytest.mark.parametrize("rows_per_part", [10, 100])
def test_retry_errors_runs_only_failed_rows(tmp_path: Path, rows_per_part: int) -> None:
    texts = prompts(tmp_path)
    spec = job(tmp_path, output={"rows_per_part": rows_per_part})
    for _ in range(2):
        assert run_job(spec, build=Model(3, 4, 26), quiet=True) is ExitCode.TOO_MANY_ROW_ERRORS
    again = Model(4)
    done = run_job(spec, build=again, retry_errors=True, quiet=True)
    assert (done, sorted(again.ran)) == (ExitCode.TOO_MANY_ROW_ERRORS, [3, 4, 26])
    repaired = Model()
    assert run_job(spec, build=repaired, retry_errors=True, quiet=True) is ExitCode.OK
    assert repaired.ran == [4]
    check_answers(tmp_path, texts)
    check_sums(tmp_path)
    assert (tmp_path / "out" / "_SUCCESS").exists()
    nothing = Model()
    assert run_job(spec, build=nothing, retry_errors=True, quiet=True) is ExitCode.OK
    assert nothing.count == 0


def test_retry_errors_of_a_successful_job(tmp_path: Path) -> None:
    prompts(tmp_path)
    spec = job(tmp_path, errors={"max_error_rate": 0.5})
    assert run_job(spec, build=Model(3), quiet=True) is ExitCode.OK
    other = (tmp_path / "out" / "data" / "part-00001.parquet").stat().st_mtime_ns
    with pytest.raises(DeviceError):
        run_job(spec, build=Build(fail_at(0, DeviceError("gone"))), retry_errors=True, quiet=True)
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    repaired = Model()
    assert run_job(spec, build=repaired, quiet=True) is ExitCode.OK, "the retry is resumed"
    assert repaired.ran == [3]
    assert (tmp_path / "out" / "data" / "part-00001.parquet").stat().st_mtime_ns == other


def test_retry_errors_of_a_stopped_run(tmp_path: Path) -> None:
    texts = prompts(tmp_path, bad=(2,))
    spec = job(tmp_path, output=ONE_PART, errors={"max_error_rate": 0.5})
    run_job(spec, build=Build(stop_at(40)), quiet=True)
    kept = on_disk(tmp_path)
    assert 2 in kept
    second = Build()
    assert run_job(spec, build=second, retry_errors=True, quiet=True) is ExitCode.OK
    assert not set(kept) & set(second.ran)
    check_answers(tmp_path, texts)


def test_retry_errors_keeps_marks_of_rows(tmp_path: Path) -> None:
    texts = [f"row {row}" for row in range(10)]
    texts[6] = "a<eos>b"
    columns = {"prompt": texts, "request": texts, "has_control_text": texts}
    write_parquet(tmp_path / "in" / "x.parquet", columns)
    spec = job(tmp_path, errors={"max_error_rate": 0.5})
    run_job(spec, build=Model(3), quiet=True)
    run_job(spec, build=Model(), retry_errors=True, quiet=True)
    for name in columns:
        assert table(tmp_path)[name].to_pylist() == texts
    rows = json.loads((tmp_path / "out" / "summary.json").read_bytes())["rows"]
    assert (rows["error"], rows["control_text"]) == (0, 1)


class Dies(Build):
    """Builds engines that die when they get the given row."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self.row = row

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        built = super().__call__(*arguments, **options)
        add = built.engine.add_request

        def add_or_die(request: Any) -> None:
            if request.row_id == self.row:
                raise RuntimeError("dead")
            add(request)

        built.engine.add_request = add_or_die
        return built


def test_in_flight_log_is_flushed_at_once_after_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts(tmp_path)
    asked: list[bool] = []

    class Log(io.FileIO):
        is_closing = False

        def flush(self) -> None:
            asked[-1] = asked[-1] or not self.is_closing

        def close(self) -> None:
            self.is_closing = True
            super().close()

    def open_log(files: LocalFiles, path: PurePath) -> io.FileIO:
        if path.parent.name != "in_flight":
            return io.FileIO(path, "ab")
        asked.append(False)
        return Log(path, "ab")

    monkeypatch.setattr(LocalFiles, "append_to", open_log)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            run_job(job(tmp_path), build=Dies(0), quiet=True)
    assert asked == [False, True, True]


@pytest.mark.parametrize("row", [0, 17, 39])
def test_row_that_kills_the_process_is_given_up(tmp_path: Path, row: int) -> None:
    texts = prompts(tmp_path)
    spec = job(tmp_path, output={"rows_per_part": 15}, engine={"max_num_seqs": 4})
    deaths = 0
    while True:
        try:
            code = run_job(spec, build=Dies(row), quiet=True)
            break
        except RuntimeError:
            deaths += 1
            assert deaths < 20
    assert code is ExitCode.TOO_MANY_ROW_ERRORS
    found = table(tmp_path).to_pylist()
    assert [r["generated_text"] for r in found if r["row_id"] != row] == [
        text[:8] for at, text in enumerate(texts) if at != row
    ]
    assert found[row]["error"] == {
        "code": "crashed_engine",
        "message": "the process died twice while this row ran alone",
    }
    check_sums(tmp_path)
    assert run_job(spec, build=Build(), retry_errors=True, quiet=True) is ExitCode.OK
    check_answers(tmp_path, texts)


class Multiplying(FakeBuild):
    """Builds engines with the given kernel, and records the pinned kernels that it gets."""

    def __init__(self, name: str, stops_at: int | None = None, what: str = "float32") -> None:
        super().__init__(max_num_seqs=4)
        self.name, self.what = name, what
        self.before: dict[str, str] = {}
        if stops_at is not None:
            self.before_step = stop_at(stops_at)

    def __call__(self, *arguments: Any, pinned_kernels: Any = None, **options: Any) -> Any:
        self.before = pinned_kernels or {}
        built = super().__call__(*arguments, **options)
        built.kernels = {self.what: self.name}
        return built


def test_resumed_run_is_pinned_to_the_first_kernels(tmp_path: Path) -> None:
    prompts(tmp_path)
    spec = job(tmp_path, output=ONE_PART)
    first = Multiplying("own AVX-512", stops_at=40)
    assert run_job(spec, build=first, quiet=True) is ExitCode.INTERRUPTED
    again = Multiplying("own AVX-512")
    assert run_job(spec, build=again, quiet=True) is ExitCode.OK
    assert (first.before, again.before) == ({}, {"float32": "own AVX-512"})
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert summary["kernels"] == {"float32": "own AVX-512"}
    over = Multiplying("onednn AVX2")
    assert run_job(spec, build=over, quiet=True, overwrite=True) is ExitCode.OK
    assert over.before == {}


@pytest.mark.parametrize(
    ("what", "says"), [("float32", "multiplied float32"), ("attention", "computed attention")]
)
def test_different_kernels_in_one_job_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, says: str
) -> None:
    prompts(tmp_path)
    spec = job(tmp_path, output=ONE_PART)
    run_job(spec, build=Multiplying("own AMX", stops_at=40, what=what), quiet=True)
    assert run_job(spec, build=Multiplying("own AVX2", what=what)) is ExitCode.OK
    printed = " ".join(capsys.readouterr().err.split())
    assert f"own AMX and own AVX2 {says} in different runs of this job" in printed
    assert printed.count(says) == 2, "printed at the start and at the end of the run"
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert summary["kernels"] == {what: "own AMX and own AVX2"}
