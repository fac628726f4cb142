"""Interrupted jobs with long answers: no token is drawn twice, and outputs stay the same."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import DeviceError, ExitCode
from batchinfer.job.claims.crashed_rows import crash_history_from
from batchinfer.job.run import pipeline
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.storage.filesystem import LocalFiles
from tests.job.datasets import flip_bit, write_parquet
from tests.job.fakes import AtOnce, FakeBuild, drawn_at_length, job

GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 1.0, "seed": 7}
OF_ROWS: list[dict[str, Any]] = [
    GREEDY,
    {},
    {"n": 3},
    {"beam_width": 3, "n": 2, "max_tokens": 20, "stop": ["BA", "DD"], "min_tokens": 6},
    {"frequency_penalty": 0.5, "min_tokens": 20},
    {"stop": ["ABBA", "DDD"], "bad_words": ["CC"]},
    {"structured_outputs": {"regex": "([A-D]{9} and )+!"}},
    {"n": 2, "min_p": 0.01},
    {"seed": 3, "n": 2},
    GREEDY,
    {"max_tokens": 1},
]
"""Sampling parameters for each kind of row; greedy rows share a prompt."""
MIXED: dict[str, dict[str, Any]] = {"sampling": SEEDED}
ACCEPTED = {"sampling": SEEDED, "accept": {"regex": "A[A-D]*$", "k": 2, "max_tries": 8}}
THINKING = {
    "sampling": {**SEEDED, "max_reasoning_tokens": 9, "structured_outputs": {"regex": "[AB]{30}"}},
    "output": {"reasoning": {"start": "AA", "end": "C"}},
    "prompt": {"column": None, "template": "{{ prompt }} AA"},
}


class Killed(BaseException):
    """An exception that the program never catches."""


def build(at: int = -1, end: Callable[[], None] = lambda: None) -> FakeBuild:
    """Return a builder whose engine calls ``end`` before the step ``at``."""
    made = FakeBuild(num_blocks=256, max_num_seqs=9, next_token=drawn_at_length)
    made.before_step = lambda step: end() if step == at else None
    return made


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail(error: BaseException) -> Callable[[], None]:
    def end() -> None:
        raise error

    return end


def long_job(folder: Path, name: str, kind: dict[str, Any] = MIXED) -> JobSpec:
    if not (folder / "in").exists():
        own = (
            OF_ROWS if kind["sampling"] is SEEDED and "accept" not in kind else [{}] * len(OF_ROWS)
        )
        prompts = ["0 asks" if one is GREEDY else f"{row} asks" for row, one in enumerate(own)]
        columns = {"prompt": prompts, "sampling_params": list(map(json.dumps, own))}
        write_parquet(folder / "in" / "x.parquet", columns)
    sampling = {"max_tokens": 50, **kind["sampling"]}
    output = {"path": str(folder / name), "rows_per_part": 5, **kind.get("output", {})}
    others = {key: kind[key] for key in kind if key not in ("sampling", "output")}
    return job(folder, sampling=sampling, output=output, **others)


@contextmanager
def flushed_at_once(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flush tokens in every turn of the engine's loop, before the next turn."""
    with patch.context() as within:
        within.setattr(LocalFiles, "flush_every_s", 0.0)
        within.setattr(pipeline, "BackgroundConsumer", AtOnce)
        yield


def rows_of(folder: Path, name: str) -> pa.Table:
    return pq.read_table(sorted((folder / name / "data").iterdir()))


def facts_of(folder: Path, name: str) -> tuple[dict[str, int], int]:
    """Return the ``tokens`` entry of the summary, and the number of tokens decoded in all runs."""
    summary = json.loads((folder / name / "summary.json").read_bytes())
    steps = pq.read_table(folder / name / "stats" / "steps.parquet")
    tokens = summary["tokens"]
    prefill = pc.sum(steps["prefill_tokens"]).as_py()
    assert prefill == tokens["prompt_computed"] + tokens["recomputed"]
    return tokens, pc.sum(steps["decode_tokens"]).as_py()


def token_files(folder: Path, name: str) -> list[Path]:
    return sorted((folder / name / "_batchinfer" / "tokens").iterdir())


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(MIXED, id="mixed"),
        pytest.param(ACCEPTED, id="accepted", marks=pytest.mark.long),
    ],
)
def test_resumed_job_draws_no_token_twice(
    tmp_path: Path, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job is stopped, and another dies right after a flush."""
    assert run_job(long_job(tmp_path, "unbroken", kind), build=build(), quiet=True) is ExitCode.OK
    unbroken, decoded_once = facts_of(tmp_path, "unbroken")
    spec = long_job(tmp_path, "stopped", kind)
    for at in (14, 11):
        assert run_job(spec, build=build(at, stop), quiet=True) is ExitCode.INTERRUPTED
        assert token_files(tmp_path, "stopped")
    assert run_job(spec, build=build(), quiet=True) is ExitCode.OK
    spec = long_job(tmp_path, "killed", kind)
    with flushed_at_once(monkeypatch):
        for at in (9, 11):
            with pytest.raises(Killed):
                run_job(spec, build=build(at, fail(Killed())), quiet=True)
    assert run_job(spec, build=build(), quiet=True) is ExitCode.OK
    for name in ("stopped", "killed"):
        assert rows_of(tmp_path, name).equals(rows_of(tmp_path, "unbroken"))
        tokens, decoded = facts_of(tmp_path, name)
        assert tokens["output"] == unbroken["output"]
        assert tokens["lost"] == unbroken["lost"] == 0
        assert tokens["recomputed"] > unbroken["recomputed"]
        # Tokens that a grammar forced, but no step computed, count as recomputed after a resume.
        assert decoded_once - 2 * len(" and ") <= decoded <= decoded_once
        assert not token_files(tmp_path, name)


def test_resume_keeps_reasoning_and_its_budget(tmp_path: Path) -> None:
    spec = long_job(tmp_path, "stopped", THINKING)
    assert run_job(spec, build=build(8, stop), quiet=True) is ExitCode.INTERRUPTED
    assert token_files(tmp_path, "stopped")
    assert run_job(spec, build=build(), quiet=True) is ExitCode.OK
    unbroken = long_job(tmp_path, "unbroken", THINKING)
    assert run_job(unbroken, build=build(), quiet=True) is ExitCode.OK
    assert rows_of(tmp_path, "stopped").equals(rows_of(tmp_path, "unbroken"))
    rows = rows_of(tmp_path, "stopped").to_pylist()
    assert max(row["num_reasoning_tokens"] for row in rows) == 9 + 1  # including the end marker
    for row in rows:
        (sample,) = row["outputs"]
        assert row["reasoning"] == sample["reasoning"]
        assert len(row["reasoning"]) == row["num_reasoning_tokens"] - 1
        answered = row["num_output_tokens"] - row["num_reasoning_tokens"]
        assert len(row["generated_text"]) == 30 == answered - 1
        assert set(row["generated_text"]) <= {"A", "B"}


def test_tokens_are_kept_after_out_of_memory_errors(tmp_path: Path) -> None:
    spec = long_job(tmp_path, "out")
    with pytest.raises(DeviceError):
        run_job(spec, build=build(14, fail(DeviceError("no memory"))), quiet=True)
    assert token_files(tmp_path, "out")
    assert run_job(spec, build=build(), quiet=True) is ExitCode.OK
    assert facts_of(tmp_path, "out")[0]["lost"] == 0


def test_tokens_of_equal_rows_are_stored_once(tmp_path: Path) -> None:
    spec = long_job(tmp_path, "out")
    assert run_job(spec, build=build(4, stop), quiet=True) is ExitCode.INTERRUPTED
    (path,) = token_files(tmp_path, "out")
    row_ids = pq.read_table(path)["row_id"].to_pylist()
    assert len({0, 9} & set(row_ids)) == 1


def empty(path: Path) -> None:
    path.write_bytes(b"")


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def rename(path: Path) -> None:
    path.rename(path.with_name("run-00001-000000-0123456789abcdef.parquet"))


@pytest.mark.parametrize("harm", [empty, tear, rename, lambda path: flip_bit(path, 300)])
def test_damaged_token_files_are_ignored(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    spec = long_job(tmp_path, "unbroken")
    assert run_job(spec, build=build(), quiet=True) is ExitCode.OK
    spec = long_job(tmp_path, "out")
    assert run_job(spec, build=build(14, stop), quiet=True) is ExitCode.INTERRUPTED
    (path,) = token_files(tmp_path, "out")
    harm(path)
    assert run_job(spec, build=build(), quiet=True) is ExitCode.OK
    assert rows_of(tmp_path, "out").equals(rows_of(tmp_path, "unbroken"))
    assert facts_of(tmp_path, "out")[0]["lost"] > 0


def test_token_files_of_another_plan_are_ignored(tmp_path: Path) -> None:
    """The files belong to an earlier job with the same prompts; some of them are written late."""
    spec = long_job(tmp_path, "out")
    assert run_job(spec, build=build(12, stop), quiet=True) is ExitCode.INTERRUPTED
    (late,) = token_files(tmp_path, "out")
    data = late.read_bytes()
    kind = {**MIXED, "output": {"rows_per_part": 4}}
    spec = long_job(tmp_path, "out", kind)
    assert run_job(spec, overwrite=True, build=build(6, stop), quiet=True) is ExitCode.INTERRUPTED
    for path in token_files(tmp_path, "out"):
        path.unlink()
    late.write_bytes(data)
    assert run_job(spec, build=build(), quiet=True) is ExitCode.OK
    assert facts_of(tmp_path, "out")[0]["lost"] > 0


def test_long_answers_are_not_suspected_of_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row finishes between the deaths, but each run draws more tokens."""
    spec = long_job(tmp_path, "out", {"sampling": {**SEEDED, "ignore_eos": True}})
    with flushed_at_once(monkeypatch):
        for _ in range(4):
            with pytest.raises(Killed):
                run_job(spec, build=build(3, fail(Killed())), quiet=True)
    assert run_job(spec, build=build(), quiet=True) is ExitCode.OK
    history = crash_history_from((tmp_path / "out" / "_batchinfer" / "suspects.json").read_bytes())
    assert not history.groups
