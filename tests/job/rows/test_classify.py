"""Classification jobs match transformers, for all kinds of heads and pairs; and bad rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.errors import ExitCode, JobError, ModelError
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.resume import plan_of
from batchinfer.job.rows.tasks import TASKS
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from batchinfer.report.from_output import find_examples
from batchinfer.report.thumbnails import Pictures
from tests.classifiers import logits, make_classifier, make_reranker, probability
from tests.job.datasets import write_parquet
from tests.job.job_files import write_job
from tests.job.rows.jobs import rows_of, summary_of
from tests.models import make_text_model

PROMPTS = ["is it so?", "x", "a long text about nothing at all, which fills some blocks and ends"]
QUERIES = ["who?", "why is it <|im_end|> so?", "x"]
DOCUMENTS = ["he did", "because", "a document that is longer than its query by far"]
LABELS = {"id2label": {0: "bad", 1: "so-so", 2: "good"}}


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Llama that generates text, with its tokenizer."""
    return make_text_model(tmp_path_factory.mktemp("text"))


def job(tmp_path: Path, model: Path, columns: dict[str, Any], more: str = "") -> Any:
    write_parquet(tmp_path / "rows.parquet", columns)
    text = f"""\
task: classify
model: {{name: {model}, dtype: float32}}
input: {{path: rows.parquet}}
engine: {{device: cpu, num_kv_blocks: 200, block_size: 4, max_num_batched_tokens: 7}}
output: {{path: out, rows_per_part: 2}}
errors: {{max_error_rate: 1.0}}
{more}"""
    return load_job(write_job(tmp_path, text))


def run(tmp_path: Path, model: Path, columns: dict[str, Any], more: str = "") -> Any:
    assert run_job(job(tmp_path, model, columns, more), quiet=True) is ExitCode.OK
    return rows_of(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "activation"),
    [
        ("llama", LABELS, "softmax"),
        ("qwen3", {"num_labels": 1}, "sigmoid"),
        ("qwen2", {"num_labels": 1, "problem_type": "regression"}, "none"),
        ("gemma2", {**LABELS, "problem_type": "multi_label_classification"}, "sigmoid"),
        ("mistral", {**LABELS, "dtype": torch.bfloat16}, "softmax"),
    ],
)
def test_scores_equal_those_of_transformers(
    tmp_path: Path, text_model: Path, family: str, changes: dict[str, Any], activation: str
) -> None:
    model = make_classifier(tmp_path / "model", text_model, family, **changes)
    rows = run(tmp_path, model, {"prompt": PROMPTS})
    names = ("label", "score", "scores", "num_prompt_tokens", "truncated", "status", "error")
    assert tuple(rows[0]) == ("prompt", "row_id", *names)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        expected = logits(model, prompt)
        if activation != "none":
            expected = expected.softmax(-1) if activation == "softmax" else expected.sigmoid()
        assert [one["score"] for one in row["scores"]] == pytest.approx(expected.tolist(), abs=1e-4)
        best = int(expected.argmax())
        known = LABELS["id2label"] if "id2label" in changes else {}
        assert row["label"] == known.get(best, f"LABEL_{best}") == row["scores"][best]["label"]
        assert row["score"] == row["scores"][best]["score"]
    summary = summary_of(tmp_path)
    assert summary["tokens"]["output"] == 0


PAIRS = "classify: {query_column: q, document_column: d}\n"


def test_pairs_are_joined_like_the_tokenizer_does(tmp_path: Path, text_model: Path) -> None:
    model = make_classifier(tmp_path / "model", text_model, num_labels=1)
    rows = run(tmp_path, model, {"q": QUERIES, "d": DOCUMENTS}, PAIRS)
    for at in (0, 2):  # the second query contains a control token, which must be read as text
        expected = float(logits(model, QUERIES[at], DOCUMENTS[at]).sigmoid())
        assert rows[at]["score"] == pytest.approx(expected, abs=1e-4)
    tokens = len(QUERIES[1]) + len(DOCUMENTS[1]) + 2
    assert rows[1]["num_prompt_tokens"] == tokens, "a token per byte, and two <s>"


def test_long_pairs_are_truncated_like_in_transformers(tmp_path: Path, text_model: Path) -> None:
    model = make_classifier(tmp_path / "model", text_model, num_labels=1)
    query, kept = "a query", 512 - 2 - len("a query")
    documents = ["word " * 200, "x" * (kept + 1), "y" * kept]
    more = PAIRS + "prompt: {on_too_long: truncate_right}\n"
    rows = run(tmp_path, model, {"q": [query] * 3, "d": documents}, more)
    assert [row["truncated"] for row in rows] == [True, True, False]
    for row, document in zip(rows, documents, strict=True):
        assert row["num_prompt_tokens"] == 512
        expected = float(logits(model, query, document[:kept]).sigmoid())
        assert row["score"] == pytest.approx(expected, abs=1e-4)


QUESTION = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {what}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def test_a_reranker_answers_yes_or_no(tmp_path: Path, text_model: Path) -> None:
    model, ids = make_reranker(tmp_path / "model", text_model)
    instruction_text = 'Say "so" {{ x }}'
    more = f"classify: {{query_column: q, document_column: d, instruction: '{instruction_text}'}}\n"
    rows = run(tmp_path, model, {"q": QUERIES, "d": DOCUMENTS}, more)
    for at in (0, 2):
        prompt = QUESTION.format(what=instruction_text, query=QUERIES[at], document=DOCUMENTS[at])
        assert rows[at]["label"] == "yes"
        expected = probability(model, prompt, ids)
        assert rows[at]["score"] == pytest.approx(expected, abs=1e-5)
    assert len({row["score"] for row in rows}) == 3
    (tmp_path / "again").mkdir()
    prompt = QUESTION.format(what=instruction_text, query=QUERIES[0], document=DOCUMENTS[0])
    more = "classify: {tokens: [no, yes]}\nprompt: {parse_special_tokens: true}\n"
    (row,) = run(tmp_path / "again", model, {"prompt": [prompt]}, more)
    assert [one["label"] for one in row["scores"]] == ["no", "yes"]
    assert row["scores"][1]["score"] == pytest.approx(rows[0]["score"], abs=1e-5)


def test_the_question_to_a_reranker_is_never_truncated(tmp_path: Path, text_model: Path) -> None:
    model, _ = make_reranker(tmp_path / "model", text_model)
    more = PAIRS + "prompt: {on_too_long: truncate_right}\n"
    with pytest.raises(JobError, match="on_too_long: truncate_right would cut off the question"):
        run_job(job(tmp_path, model, {"q": ["x"], "d": ["x"]}, more), quiet=True)


def test_logit_score_names_the_tokens(tmp_path: Path, text_model: Path) -> None:
    model, ids = make_reranker(tmp_path / "model", text_model)
    (model / "1_LogitScore").mkdir()
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    (model / "modules.json").write_text(json.dumps([{"path": "1_LogitScore", "type": kind}]))
    saved = {"true_token_id": ids[0], "false_token_id": ids[1]}
    (model / "1_LogitScore" / "config.json").write_text(json.dumps(saved))
    activation = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (model / "config_sentence_transformers.json").write_text(json.dumps(activation))
    (row,) = run(tmp_path, model, {"prompt": ["x"]})
    expected = probability(model, "x", ids[::-1])
    assert 1 / (1 + np.exp(-row["score"])) == pytest.approx(expected, abs=1e-5)


def test_rows_that_cannot_run_have_no_label(tmp_path: Path, text_model: Path) -> None:
    model = make_classifier(tmp_path / "model", text_model, num_labels=1)
    columns = {"q": ["good", None, "x", "x"], "d": ["good", "x", " ", "x" * 600]}
    rows = run(tmp_path, model, columns, PAIRS)
    codes = [row["error"] and row["error"]["code"] for row in rows]
    assert codes == [None, "empty_prompt", "empty_prompt", "prompt_too_long"]
    assert [row["label"] for row in rows] == ["LABEL_0", None, None, None]
    assert [row["scores"] is None for row in rows] == [False, True, True, True]
    out = OutputDir(tmp_path / "out")
    records = [(part, out.finished(part)) for part in plan_of(out).parts()]
    good, bad, *_ = find_examples(out, records, TASKS["classify"], Pictures({}, ""))
    assert good.answer.startswith("LABEL_0: 0.")
    assert (bad.answer, bad.facts) == (None, "0 input tokens")


def test_only_equal_heads_and_rows_are_reused(tmp_path: Path, text_model: Path) -> None:
    model = make_classifier(tmp_path / "model", text_model, **LABELS)
    run(tmp_path, model, {"prompt": PROMPTS})
    for name, more, reused in (("same", "", 3), ("other", "classify: {activation: none}\n", 0)):
        (tmp_path / name).mkdir()
        spec = job(tmp_path / name, model, {"prompt": PROMPTS}, more)
        update = {"output": spec.output.model_copy(update={"reuse": (str(tmp_path / "out"),)})}
        assert run_job(spec.model_copy(update=update), quiet=True) is ExitCode.OK
        summary = json.loads((tmp_path / name / "out" / "summary.json").read_bytes())
        assert summary["rows"]["reused"] == reused


def test_a_model_is_checked(tmp_path: Path, text_model: Path) -> None:
    rows = {"prompt": ["x"], "q": ["x"], "d": ["x"], "n": [1]}
    with pytest.raises(ModelError, match="no classification head"):
        run_job(job(tmp_path, text_model, rows), quiet=True)
    for keys, message in (
        (
            "tokens: [a, perhaps]",
            "'perhaps' is not a single token of the model\nname single",
        ),
        ("query_column: q, document_column: d, tokens: [a, b]", "in which the model expects"),
    ):
        with pytest.raises(JobError, match=message):
            run_job(job(tmp_path, text_model, rows, f"classify: {{{keys}}}\n"), quiet=True)
    model = make_classifier(tmp_path / "model", text_model, **LABELS)
    with pytest.raises(JobError, match=r"classify.document_column: .* column n is int64"):
        run_job(job(tmp_path, model, rows, PAIRS.replace(": d", ": n")), quiet=True)
    spec = job(tmp_path, model, rows)
    text = (tmp_path / "job.yaml").read_text()
    changed = text.replace("task: classify", "sampling: {max_tokens: 3}")
    assert spec.task == "classify"
    with pytest.raises(JobError, match="generates no text; set task: classify to run it"):
        run_job(load_job(write_job(tmp_path, changed)), quiet=True)
    config = json.loads((model / "config.json").read_bytes())
    config["id2label"].pop("1")
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(JobError, match="id2label"):
        run_job(job(tmp_path, model, rows), quiet=True)
