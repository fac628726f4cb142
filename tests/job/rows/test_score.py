"""Scoring jobs match transformers; bad rows become errors."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchinfer.errors import DataError, ExitCode, UsageError
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.resume import plan_of
from batchinfer.job.plan.plan import plan_job
from batchinfer.job.rows.score import Scoring
from batchinfer.job.rows.tasks import TASKS
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.spec.task_keys import SCORE as SCORE_SPEC
from batchinfer.report.from_output import find_examples
from batchinfer.report.thumbnails import Pictures
from batchinfer.requests.requests import PromptRow
from batchinfer.text.scoring_prompts import ScoredPrompt
from tests.job.datasets import write_parquet
from tests.job.job_files import write_job
from tests.job.rows.jobs import rows_of, summary_of

CLOSE = 1e-4
JOBS = Path(__file__).parent.parent.parent.parent / "jobs"
CHOICES = [["yes", "no", " maybe so", "y"], ["a"], ["one two", "one three"]]


def job(tmp_path: Path, model: Path, columns: dict[str, Any], text: str = "") -> JobSpec:
    write_parquet(tmp_path / "rows.parquet", columns)
    job_file = f"""\
task: score
model: {{name: {model}, dtype: float32}}
input: {{path: rows.parquet}}
prompt: {{chat_template: none}}
score: {{completions_column: choices}}
engine: {{device: cpu, num_kv_blocks: 64, block_size: 4, max_num_batched_tokens: 16}}
output: {{path: out, rows_per_part: 2}}
errors: {{max_error_rate: 1.0}}
"""
    for line in text.splitlines():
        section = line.partition(":")[0]
        kept = [old for old in job_file.splitlines() if not old.startswith(section + ":")]
        job_file = "\n".join([*kept, line] if line.partition(":")[2] else kept)
    return load_job(write_job(tmp_path, job_file))


@cache
def reference_of(model: Path) -> torch.nn.Module:
    """Return the same model, as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def judged(model: Path, context: list[int], continuation: list[int]) -> tuple[list[float], bool]:
    """Return log-probabilities of a continuation, and whether greedy decoding would give it."""
    reference = reference_of(model)
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([context + continuation])).logits[0]
    own = logits.log_softmax(-1)[len(context) - 1 : -1]
    ids = torch.tensor(continuation)
    found = own.gather(1, ids[:, None])[:, 0]
    return found.tolist(), bool((own.argmax(-1) == ids).all())


@pytest.mark.parametrize(("num_completions", "points"), [(0, ()), (1, ()), (3, ((4, 2),))])
def test_states_are_kept_only_for_further_completions(
    num_completions: int, points: tuple[tuple[int, int], ...]
) -> None:
    completions = tuple(np.array([7, at], np.int32) for at in range(num_completions))
    prompt = ScoredPrompt(np.arange(5, dtype=np.int32), None, False, False, completions=completions)
    requests = Scoring(None, ()).requests(PromptRow(0, prompt))  # type: ignore[arg-type]
    assert [request.branch_points for request in requests][:1] == [points]


def test_scores_equal_those_of_transformers(tmp_path: Path, model: Path) -> None:
    prompts = ["is it so? ", "a long question about nothing at all, asked twice", "count: "]
    spec = job(
        tmp_path,
        model,
        {"prompt": prompts, "choices": CHOICES},
        "output: {path: out, include: [logprobs, token_ids, prompt], rename: {prompt: asked}}",
    )
    assert run_job(spec, quiet=True) is ExitCode.OK
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = rows_of(tmp_path)
    assert tuple(rows[0])[2:] == SCORE_SPEC.columns(["prompt"])
    for row, prompt, choices in zip(rows, prompts, CHOICES, strict=True):
        context = tokenizer(prompt.rstrip()).input_ids
        assert (row["prompt"], row["num_prompt_tokens"]) == (prompt, len(context))
        assert (row["status"], row["error"], row["truncated"]) == ("ok", None, False)
        assert [score["index"] for score in row["score"]] == list(range(len(choices)))
        for score, choice in zip(row["score"], choices, strict=True):
            continuation = tokenizer(prompt + choice).input_ids[len(context) :]
            logprobs, greedy = judged(model, context, continuation)
            assert score["token_ids"] == continuation
            assert score["num_tokens"] == len(continuation)
            assert score["logprobs"] == pytest.approx(logprobs, abs=CLOSE)
            assert math.isclose(score["sum_logprob"], sum(logprobs), abs_tol=CLOSE)
            assert score["greedy_match"] == greedy
        total = sum(score["sum_logprob"] for score in row["score"])
        count = sum(score["num_tokens"] for score in row["score"])
        assert math.isclose(row["perplexity"], math.exp(-total / count), rel_tol=1e-6)


def test_a_report_shows_scores(tmp_path: Path, model: Path) -> None:
    columns = {"prompt": ["x", ""], "choices": [["a", "b"]] * 2, "generated_text": ["kept", "too"]}
    assert run_job(job(tmp_path, model, columns), quiet=True) is ExitCode.OK
    out = OutputDir(tmp_path / "out")
    records = [(part, out.finished(part)) for part in plan_of(out).parts()]
    good, bad = find_examples(out, records, TASKS["score"], Pictures({}, ""))
    assert good.answer.startswith("log-likelihood 0: -")
    assert "perplexity" in good.facts
    assert ("generated_text", "kept") in good.inputs
    assert (bad.answer, bad.facts) == (None, "0 input tokens")
    assert bad.error is not None


def test_a_greedy_answer_is_a_greedy_match(tmp_path: Path, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model)
    inputs = tokenizer("hello", return_tensors="pt")
    own = reference.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=-1)[0, 5:]
    other = [*own[:-1].tolist(), int(own[-1] + 1) % 200]
    choices = pa.array([[own.tolist(), other, own[:1].tolist()]])
    spec = job(tmp_path, model, {"prompt": ["hello"], "choices": choices})
    assert run_job(spec, quiet=True) is ExitCode.OK
    assert [score["greedy_match"] for score in rows_of(tmp_path)[0]["score"]] == [True, False, True]


def test_prompts_are_scored_if_there_are_no_completions(tmp_path: Path, model: Path) -> None:
    prompts = ["hello there", "x", "a much longer text than the others, which fills some blocks"]
    spec = job(tmp_path, model, {"prompt": prompts}, "score:")
    assert run_job(spec, quiet=True) is ExitCode.OK
    tokenizer = AutoTokenizer.from_pretrained(model)
    for row, prompt in zip(rows_of(tmp_path), prompts, strict=True):
        ids = tokenizer(prompt).input_ids
        logprobs, greedy = judged(model, [tokenizer.bos_token_id], ids)
        (score,) = row["score"]
        assert (score["num_tokens"], score["greedy_match"]) == (len(ids), greedy)
        assert math.isclose(score["sum_logprob"], sum(logprobs), abs_tol=CLOSE)
        assert math.isclose(row["perplexity"], math.exp(-sum(logprobs) / len(ids)), rel_tol=CLOSE)
        assert row["num_prompt_tokens"] == len(ids) + 1


def test_bad_rows_have_error_codes(tmp_path: Path, model: Path) -> None:
    choices = [["yes"], None, [], ["yes", ""], ["yes", "n" * 600], ["no"], ["no"]]
    prompts = ["good", "null", "none", "empty", "long", "", "x" * 511]
    spec = job(tmp_path, model, {"prompt": prompts, "choices": choices})
    assert run_job(spec, quiet=True) is ExitCode.OK
    rows = rows_of(tmp_path)
    codes = [row["error"] and row["error"]["code"] for row in rows]
    empty = ["empty_completion"] * 3
    assert codes == [None, *empty, "prompt_too_long", "empty_prompt", "prompt_too_long"]
    assert rows[3]["error"]["message"] == "column choices: completion 1 is empty"
    assert rows[4]["num_prompt_tokens"] == 604
    assert all(row["score"] is None and row["perplexity"] is None for row in rows[1:])
    summary = summary_of(tmp_path)
    assert summary["rows"]["error_codes"]["empty_completion"] == 3


def test_plan_counts_rows_that_cannot_be_scored(tmp_path: Path, model: Path) -> None:
    spec = job(tmp_path, model, {"prompt": ["x"] * 3, "choices": [["yes"], ["no"], []]})
    assert plan_job(spec)["errors"] == {"empty_completion": 1}
    with pytest.raises(UsageError, match="writes no tokens"):
        plan_job(spec, expect_output_tokens=3)


def test_does_not_fit_names_the_completion(tmp_path: Path, model: Path) -> None:
    columns = {"prompt": ["one", "two"], "choices": [["yes", "n" * 300], ["yes", "no"]]}
    spec = job(tmp_path, model, columns)
    assert run_job(spec, quiet=True) is ExitCode.OK
    bad, good = rows_of(tmp_path)
    assert bad["error"]["code"] == "does_not_fit"
    assert bad["error"]["message"].startswith("completion 1: ")
    assert (bad["score"], good["status"], len(good["score"])) == (None, "ok", 2)


def test_the_prompt_is_computed_once_for_its_completions(tmp_path: Path, model: Path) -> None:
    prompt, choices = "p" * 101, ["abcd", "efgh", "ijkl", "mnop"]
    spec = job(tmp_path, model, {"prompt": [prompt], "choices": [choices]}, "engine: {device: cpu}")
    assert run_job(spec, quiet=True) is ExitCode.OK
    summary = summary_of(tmp_path)
    tokens = summary["tokens"]
    # A completion's last token is not computed. The prompt's last token is computed for each
    # completion, because its logits are needed.
    assert tokens["prompt"] == 4 * (101 + 3)
    assert tokens["prompt_computed"] == 101 + 3 * 1 + 4 * 3
    assert (tokens["output"], tokens["recomputed"]) == (0, 0)
    assert summary["sharing"]["distinct_tokens"] == 101 + 4 * 3
    steps = pq.read_table(tmp_path / "out" / "stats" / "steps.parquet")
    assert sum(steps["prefill_tokens"].to_pylist()) == tokens["prompt_computed"]
    (request,) = pq.read_table(tmp_path / "out" / "stats" / "requests.parquet").to_pylist()
    assert (request["prompt_tokens"], request["output_tokens"]) == (tokens["prompt"], 0)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"choices": [1]}, "it must be string, list<string>, or list<list<int>> (token ids)"),
        ({"chioces": ["a"]}, 'score.completions_column: the data has no column "choices"'),
    ],
)
def test_the_column_is_checked_before_the_model_loads(
    tmp_path: Path, column: dict[str, Any], message: str
) -> None:
    spec = job(tmp_path, tmp_path / "nowhere", {"prompt": ["x"], **column})
    with pytest.raises(DataError) as caught:
        run_job(spec, quiet=True)
    assert message in str(caught.value)
