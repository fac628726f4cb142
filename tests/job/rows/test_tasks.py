"""Interrupted jobs, and plans of jobs, for all tasks that draw no samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import ExitCode, UsageError
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.verify import verify
from batchinfer.job.plan.plan import plan_job
from batchinfer.job.rows.finished_row import FinishedRow
from batchinfer.job.rows.pooling.pooled import Pooled
from batchinfer.job.rows.score import Scoring
from batchinfer.job.run import pipeline
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.requests.requests import PromptRow
from tests.classifiers import make_classifier
from tests.encoders import make_encoder
from tests.job.datasets import write_parquet
from tests.job.job_files import SCORE, write_job
from tests.job.rows.jobs import rows_of, summary_of
from tests.models import make_text_model

KINDS = ("score", "embed", "classify", "encoder")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    if kind == "encoder":
        return make_encoder(folder / "encoder", "bert", max_length=20)
    text_model = make_text_model(folder / "text")
    return make_classifier(folder / "own", text_model) if kind == "classify" else text_model


def job(folder: Path, kind: str, model: Path, prompts: list[str]) -> JobSpec:
    choices = [["yes", "no", "maybe not"]] * len(prompts)
    write_parquet(folder / "rows.parquet", {"prompt": prompts, "choices": choices})
    more = {
        "score": "prompt: {chat_template: none}\nscore: {completions_column: choices}\n",
        "encoder": "prompt: {on_too_long: truncate_right}\n",
    }
    text = f"""\
task: {"embed" if kind == "encoder" else kind}
model: {{name: {model}, dtype: float32}}
input: {{path: rows.parquet, keep_columns: []}}
engine: {{device: cpu, {"max_num_seqs: 2" if kind == "encoder" else "num_kv_blocks: 300"}}}
output: {{path: out, rows_per_part: 2}}
{more.get(kind, "")}"""
    return load_job(write_job(folder, text))


def test_an_interrupted_job_resumes(
    tmp_path: Path, kind: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(tmp_path, kind, model, ["a b c", *(f"x{row}" for row in range(6)), "a b"])
    assert run_job(spec, quiet=True) is ExitCode.OK
    unbroken = rows_of(tmp_path)
    task: Any = Scoring if kind == "score" else Pooled
    finish, seen = task.finish, list[int]()

    def fails(self: Any, row: PromptRow, completions: Any) -> FinishedRow:
        seen.append(row.row_id)
        if len(seen) == 5:
            raise KeyboardInterrupt
        found: FinishedRow = finish(self, row, completions)
        return found

    monkeypatch.setattr(pipeline, "_WRITES_DUE", 1)
    monkeypatch.setattr(task, "finish", fails)
    with pytest.raises(KeyboardInterrupt):
        run_job(spec, overwrite=True, quiet=True)
    assert run_job(spec, quiet=True) is ExitCode.OK
    assert len(seen) == len(unbroken) + 1, "finished rows were not computed again"
    assert [row["row_id"] for row in rows_of(tmp_path)] == list(range(8))
    for before, after in zip(unbroken, rows_of(tmp_path), strict=True):
        assert str(after) == str(before)
    found = verify(OutputDir(tmp_path / "out"))
    assert (found.complete, found.problems) == (True, [])


def test_the_plan_matches_the_run(tmp_path: Path, kind: str, model: Path) -> None:
    spec = job(tmp_path, kind, model, [f"{'shared ' * 9}{row}" for row in range(20)])
    plan = plan_job(spec)
    assert run_job(spec, quiet=True) is ExitCode.OK
    tokens = summary_of(tmp_path)["tokens"]
    assert plan["prompt_tokens"] == tokens["prompt"]
    assert plan["prompt_computed"] == tokens["prompt_computed"]
    assert (tokens["prompt_computed"] < tokens["prompt"] / 2) == (kind != "encoder")
    assert plan["output_tokens"] == tokens["output"] == 0
    sharing = summary_of(tmp_path)["sharing"]
    assert plan["sharing"]["distinct_tokens"] == sharing["distinct_tokens"]
    assert plan["time_s"] > 0
    size = sum(path.stat().st_size for path in (tmp_path / "out" / "data").iterdir())
    assert size / 5 < plan["output_bytes"] < size * 5


EMBED = "task: embed\nmodel: {name: m}\ninput: {path: rows.parquet}\noutput: {path: out}\n"
CLASSIFY = EMBED.replace("embed", "classify")
PAIRS = "classify: {query_column: q, document_column: d}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SCORE + "sampling: {max_tokens: 8}", "line 6: sampling cannot be used with task: score"),
        (SCORE.replace("task: score", "sampling: {max_tokens: 1}"), "score needs task: score"),
        (SCORE.replace("out}", "out, include: [prompt_logprobs]}"), "needs task: generate"),
        (SCORE.replace("out}", "out, rename: {a: score}}"), '"score" is the name of an output'),
        (SCORE.replace("parquet}", "parquet, keep_columns: [perplexity]}"), "output.rename"),
        (EMBED + "sampling: {max_tokens: 8}", "sampling cannot be used with task: embed"),
        (EMBED.replace("task: embed", "embed: {}\nsampling: {max_tokens: 1}"), "needs task: embed"),
        (EMBED + "embed: {pooling: sum}", 'embed.pooling is "sum"; it must be'),
        (
            EMBED.replace("out}", "out, include: [logprobs]}"),
            "logprobs cannot be used with task: embed",
        ),
        (CLASSIFY + "classify: {query_column: q}", "query_column needs document_column"),
        (
            CLASSIFY + PAIRS + "prompt: {column: q}",
            "prompt.column cannot be combined with classify.query_column",
        ),
        (CLASSIFY + PAIRS + "prompt: {on_too_long: truncate_left}", "would cut off the query"),
        (CLASSIFY + "classify: {instruction: x}", "instruction needs query_column"),
        (CLASSIFY + "classify: {tokens: [yes]}", "must be two or more tokens"),
    ],
)
def test_a_job_file_is_checked(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_job(write_job(tmp_path, text))
    assert message in str(caught.value)
