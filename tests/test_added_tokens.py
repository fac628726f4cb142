"""Tokens that a tokenizer's config adds, but that the model has no embeddings for."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer import LLM, SamplingParams
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from tests.encoders import make_encoder
from tests.models import make_text_model

ADDED = "<added>"
SHORT = SamplingParams(max_tokens=2)


def with_added_token(folder: Path) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra_special_tokens": [ADDED]}))
    return folder


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_added_token(make_text_model(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def llm(text_model: Path) -> LLM:
    return LLM(text_model, dtype="float32", device="cpu", num_kv_blocks=16)


def test_prompt_with_added_token_is_an_error(llm: LLM) -> None:
    message = "prompt 1: the text contains token 259.*token ids end at 258"
    with pytest.raises(ValueError, match=message):
        llm.generate(["fine", f"not {ADDED}"], SHORT, use_tqdm=False)
    fine, failed = llm.generate(["fine", f"not {ADDED}"], SHORT, use_tqdm=False, errors="return")
    assert fine.error is None
    assert failed.error.code == "unsupported_content"


def test_banned_added_token_is_ignored(llm: LLM) -> None:
    banned = SamplingParams(max_tokens=2, bad_words=[ADDED], temperature=0.0)
    plain = SamplingParams(max_tokens=2, temperature=0.0)
    (one,), (other,) = (llm.generate("x", params, use_tqdm=False) for params in (banned, plain))
    assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_encoder_text_with_added_token_is_an_error(tmp_path: Path) -> None:
    llm = LLM(with_added_token(make_encoder(tmp_path, "bert")), dtype="float32", device="cpu")
    fine, failed = llm.embed(["a b", ADDED], use_tqdm=False, errors="return")
    assert fine.error is None
    assert failed.error.code == "unsupported_content"


def test_completion_with_added_token_is_a_row_error(tmp_path: Path, text_model: Path) -> None:
    rows = [{"prompt": "a", "answers": ["b", ADDED]}, {"prompt": "a", "answers": ["b"]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    job = {
        "task": "score",
        "model": {"name": str(text_model), "dtype": "float32"},
        "input": "in.parquet",
        "prompt": {"chat_template": "none", "parse_special_tokens": True},
        "score": {"completions_column": "answers"},
        "engine": {"device": "cpu", "num_kv_blocks": 16},
        "output": {"path": "out"},
        "errors": {"max_error_rate": 1.0},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    run_job(load_job(tmp_path / "job.yaml"), quiet=True)
    found = pq.read_table(tmp_path / "out" / "data")
    assert found.column("status").to_pylist() == ["error", "ok"]
