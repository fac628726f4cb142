"""Jobs that classify with encoders: labels and pairs equal those of transformers' heads."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from batchinfer.config import ClassifyConfig
from batchinfer.errors import ExitCode, ModelError
from batchinfer.job.plan.plan import plan_job
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from batchinfer.pooling.classifier import read_classifier
from tests.encoders import encoder_config, save_tokenizer
from tests.job.datasets import write_parquet
from tests.job.job_files import write_job

TEXTS = ["a b c", "of", "z y x of the and a", "c d e f g h i j k l m n", "the " * 60]
OTHERS = ["q", "r s t u v", "a b", "the " * 60, "b"]


def make_classifier(folder: Path, family: str, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **encoder_config(family), **changes)
    model = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder, 20)
    return folder


def run(tmp_path: Path, model: Path, columns: dict[str, Any], more: str = "") -> Any:
    write_parquet(tmp_path / "rows.parquet", columns)
    text = f"""\
task: classify
model: {{name: {model}, dtype: float32}}
input: {{path: rows.parquet}}
prompt: {{on_too_long: truncate_right}}
engine: {{device: cpu, max_num_seqs: 2}}
output: {{path: out}}
{more}"""
    assert run_job(load_job(write_job(tmp_path, text)), quiet=True) is ExitCode.OK
    return pq.read_table(next((tmp_path / "out" / "data").iterdir())).to_pylist()


def logits(model: Path, *texts: list[str]) -> Any:
    """Return transformers' logits for each text or pair, computed one at a time."""
    loaded = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer, found = AutoTokenizer.from_pretrained(model), []
    takes_types = "token_type_ids" in inspect.signature(loaded.forward).parameters
    for one in zip(*texts, strict=True):
        cut = {"truncation": "longest_first", "max_length": 20}
        inputs = tokenizer(*one, **cut, return_tensors="pt")
        if not takes_types or getattr(loaded.config, "type_vocab_size", 0) < 2:
            inputs.pop("token_type_ids", None)
        with torch.no_grad():
            found.append(loaded(**inputs).logits[0])
    return torch.stack(found)


HEADS: list[tuple[str, dict[str, Any]]] = [
    ("bert", {}),
    ("roberta", {}),
    ("xlm-roberta", {}),
    ("camembert", {}),
    ("distilbert", {}),
    ("electra", {}),
    ("mpnet", {}),
    ("modernbert", {"classifier_pooling": "mean", "classifier_bias": True}),
    ("modernbert", {"classifier_pooling": "cls"}),
]
"""Families with supported heads, and changes to their configs."""


@pytest.mark.parametrize(("family", "changes"), HEADS)
def test_labels_equal_those_of_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    labels = {"id2label": {0: "bad", 1: "so-so", 2: "good"}}
    model = make_classifier(tmp_path / "model", family, **labels, **changes)
    rows = run(tmp_path, model, {"prompt": TEXTS})
    expected = logits(model, TEXTS).softmax(1).numpy()
    scores = [[each["score"] for each in row["scores"]] for row in rows]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert [row["label"] for row in rows] == [labels["id2label"][i] for i in expected.argmax(1)]


@pytest.mark.parametrize(
    ("family", "segments"),
    [("bert", True), ("bert", False), ("xlm-roberta", False), ("modernbert", True)],
)
def test_pairs_are_scored_like_by_a_cross_encoder(
    tmp_path: Path, family: str, segments: bool
) -> None:
    model = make_classifier(tmp_path / "model", family, num_labels=1)
    save_tokenizer(model, 20, segments=segments)
    pairs = "classify: {query_column: query, document_column: document}\n"
    rows = run(tmp_path, model, {"query": TEXTS, "document": OTHERS}, pairs)
    expected = logits(model, TEXTS, OTHERS).sigmoid()[:, 0].numpy()
    np.testing.assert_allclose([row["score"] for row in rows], expected, atol=1e-5)
    assert [row["truncated"] for row in rows] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("roberta", r"no tensor classifier\.dense\.weight"),
        ("nomic_bert", "classification heads of the family 'nomic_bert'"),
    ],
)
def test_unsupported_heads_are_refused(tmp_path: Path, family: str, message: str) -> None:
    model = make_classifier(tmp_path / "model", "bert", num_labels=1)
    config = json.loads((model / "config.json").read_bytes())
    (model / "config.json").write_text(json.dumps(config | {"model_type": family}))
    with pytest.raises(ModelError, match=message):
        read_classifier(str(model), None, ClassifyConfig(), lambda text: None)


def test_a_plan_counts_the_bytes_of_scores(tmp_path: Path) -> None:
    planned = []
    for labels in (1, 101):
        folder = tmp_path / str(labels)
        folder.mkdir()
        model = make_classifier(folder / "model", "bert", num_labels=labels)
        run(folder, model, {"prompt": TEXTS})
        planned.append(plan_job(load_job(folder / "job.yaml"))["output_bytes"])
    assert planned[1] - planned[0] == 4 * 100 * len(TEXTS)
