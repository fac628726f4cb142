"""Jobs that embed with encoders: values, truncation, and texts that are not embedded."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from batchinfer.builders.engine import build_engine
from batchinfer.console.table import plain
from batchinfer.errors import ExitCode, ModelError, UsageError
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.plan.plan import plan_job
from batchinfer.job.run.reporter import summary_facts
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from batchinfer.report.write import write_report
from batchinfer.worker.encoder import loader
from batchinfer.worker.encoder.loader import Encoder
from tests.encoders import make_encoder, reference_states
from tests.job.datasets import write_parquet
from tests.job.job_files import write_job
from tests.job.rows.jobs import rows_of, summary_of

SAME = 0.99999
TEXTS = ["a b c", "of", "z y x of the and a", "the " * 60, "b", "c d e f g h i j k l m n", "q r s"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"), "bert", max_length=20)


def job(tmp_path: Path, model: Path, texts: list[str] = TEXTS, more: str = "") -> Any:
    write_parquet(tmp_path / "rows.parquet", {"prompt": texts})
    return load_job(
        write_job(
            tmp_path,
            f"""\
task: embed
model: {{name: {model}, dtype: float32}}
input: {{path: rows.parquet}}
prompt: {{on_too_long: truncate_right}}
engine: {{device: cpu, max_num_seqs: 2}}
output: {{path: out, rows_per_part: 2}}
errors: {{max_error_rate: 1.0}}
{more}""",
        )
    )


def expected(model: Path, texts: list[str], cut: int = 20) -> list[Any]:
    """Return the mean hidden states in transformers, whose tokenizer truncates the texts."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(texts, truncation=True, max_length=cut)["input_ids"]
    return [states.mean(0) for states in reference_states(model, ids)]


def assert_embeddings(rows: list[dict[str, Any]], vectors: list[Any]) -> None:
    for row, vector in zip(rows, vectors, strict=True):
        cosine = np.dot(row["embedding"], vector) / np.linalg.norm(vector)
        assert cosine > SAME


def test_texts_are_truncated_like_the_tokenizer_does(tmp_path: Path, model: Path) -> None:
    spec = job(tmp_path, model)
    plan = plan_job(spec)
    assert (plan["num_blocks"], plan["truncated"]) == (0, 1)
    assert run_job(spec, quiet=True) is ExitCode.OK
    rows = rows_of(tmp_path)
    assert_embeddings(rows, expected(model, TEXTS))
    assert [row["truncated"] for row in rows] == [len(text) > 100 for text in TEXTS]
    assert [row["row_id"] for row in rows] == list(range(len(TEXTS)))
    summary = summary_of(tmp_path)
    assert summary["kv"]["num_blocks"] == 0
    assert summary["tokens"]["prompt"] == sum(row["num_prompt_tokens"] for row in rows)
    write_report(OutputDir(tmp_path / "out"), time.time())
    html = (tmp_path / "out" / "report.html").read_text()
    assert "no KV pool" in html
    assert "Inside the pool" not in html
    facts = dict(line.split(maxsplit=1) for line in plain(summary_facts(summary, tmp_path)))
    assert {*facts} == {"rows", "tokens", "files"}
    assert facts["tokens"].endswith(" rows/s")


def with_pooling(folder: Path, model: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    module = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
    (folder / "modules.json").write_text(json.dumps([module]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


def test_several_poolings_are_concatenated(tmp_path: Path, model: Path) -> None:
    legacy = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    folder = with_pooling(tmp_path / "model", model, legacy)
    assert run_job(job(tmp_path, folder, TEXTS[:2]), quiet=True) is ExitCode.OK
    ids = AutoTokenizer.from_pretrained(model)(TEXTS[:2])["input_ids"]
    states = reference_states(model, ids)
    assert_embeddings(rows_of(tmp_path), [np.concatenate([s[0], s.mean(0)]) for s in states])
    with pytest.raises(UsageError, match="concatenates cls and mean pooling; set"):
        run_job(job(tmp_path, folder, TEXTS, "embed: {pooling: cls}\n"), quiet=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pooling_mode": ["mean", "sparse"]}, "pooling by sparse is not yet supported"),
        ({"pooling_mode": []}, "pooling by none is not yet supported"),
    ],
)
def test_unsupported_pooling_is_refused(
    tmp_path: Path, model: Path, config: dict[str, Any], message: str
) -> None:
    folder = with_pooling(tmp_path / "model", model, config)
    with pytest.raises(ModelError, match=message):
        run_job(job(tmp_path, folder), quiet=True)


def test_a_deterministic_job_refuses_batch_dependent_encoders(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(tmp_path, model, TEXTS[:2])
    pinned = replace(spec.engine, deterministic=True, num_kv_blocks=4, swap_space=0)
    log: list[str] = []
    config = spec.model.config("pooling")
    monkeypatch.setattr(loader, "verify", lambda *_: True)
    monkeypatch.setattr(Encoder, "__call__", lambda self, ids, *rest: torch.ones(len(ids), 1))
    build_engine(config, pinned, log=log.append)
    assert "no effect: engine.num_kv_blocks, engine.swap_space" in log[-1]
    counted = lambda self, ids, *rest: torch.full((len(ids), 1), 1.0 * len(ids))  # noqa: E731
    monkeypatch.setattr(Encoder, "__call__", counted)
    with pytest.raises(ModelError, match="last bits of"):
        build_engine(config, pinned, log=log.append)


def test_include_prompt_false_leaves_the_prompt_out(tmp_path: Path, model: Path) -> None:
    folder = with_pooling(tmp_path / "m", model, {"pooling_mode": "mean", "include_prompt": False})
    named = {"prompts": {"query": "q r "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(named))
    assert run_job(job(tmp_path, folder, TEXTS[:3]), quiet=True) is ExitCode.OK
    ids = AutoTokenizer.from_pretrained(model)([f"q r {text}" for text in TEXTS[:3]])["input_ids"]
    states = reference_states(model, ids)
    assert_embeddings(rows_of(tmp_path), [s[3:].mean(0) for s in states])


def test_a_causal_model_pools_all_its_tokens(tmp_path: Path) -> None:
    causal = make_encoder(tmp_path / "causal", "mistral", causal=True)
    folder = with_pooling(tmp_path / "model", causal, {"pooling_mode": "mean"})
    spec = job(tmp_path, folder)
    plan = plan_job(spec)
    assert run_job(spec, quiet=True) is ExitCode.OK
    assert_embeddings(rows_of(tmp_path), expected(causal, TEXTS, 40))
    summary = summary_of(tmp_path)
    assert (summary["kv"]["num_blocks"], plan["num_blocks"]) == (0, 0)
    assert plan["prompt_tokens"] == summary["tokens"]["prompt"]


def test_texts_are_lowercased_if_the_config_says_so(tmp_path: Path, model: Path) -> None:
    folder = with_pooling(tmp_path / "cased", model, {"pooling_mode": "mean"})
    saved = json.loads((folder / "tokenizer.json").read_bytes()) | {"normalizer": None}
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    assert run_job(job(tmp_path, folder, ["A b C"]), quiet=True) is ExitCode.OK
    assert_embeddings(rows_of(tmp_path), expected(model, ["a b c"]))
