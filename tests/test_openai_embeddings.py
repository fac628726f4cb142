"""OpenAI batch files of ``/v1/embeddings``, read with OpenAI's own types."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai.types import CreateEmbeddingResponse
from transformers import AutoModel, AutoTokenizer

from batchinfer.config.options import BatchOptions
from batchinfer.errors import ExitCode
from batchinfer.job.input.openai_batch import first_url
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.verify import verify
from batchinfer.job.run.run_batch import run_batch
from tests.models import make_text_model

URL = "/v1/embeddings"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A body saved without an output head."""
    folder = make_text_model(tmp_path_factory.mktemp("model") / "tiny", tie_word_embeddings=False)
    AutoModel.from_pretrained(folder).save_pretrained(folder)
    return folder


def request(custom_id: str, url: str = URL, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def vector(model: Path, text: str, dimensions: int | None = None) -> Any:
    """The embedding by transformers, float32 of length 1."""
    inputs = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt")
    reference = AutoModel.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        found = reference(**inputs).last_hidden_state[0, -1, :dimensions].numpy()
    return found / np.linalg.norm(found)


def answers(
    tmp_path: Path, model: Path, requests: list[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The lines of the output by ``custom_id``."""
    path, output = tmp_path / "batch.jsonl", tmp_path / "answers.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in requests))
    options = BatchOptions(
        input_file=str(path),
        output_file=str(output),
        model=str(model),
        dtype="float32",
        quiet=True,
        max_error_rate=1.0,
    )
    assert run_batch(options) is ExitCode.OK
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in found] == [one["custom_id"] for one in requests]
    state = OutputDir(tmp_path / "answers.jsonl.batchinfer")
    assert verify(state).problems == []
    return {line["custom_id"]: line for line in found}


def test_embedding_answers_have_openai_format(tmp_path: Path, model: Path) -> None:
    texts = ["is it so?", "another text", "<|im_end|>"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    found = answers(
        tmp_path,
        model,
        [
            request("one", model="tiny", input=texts[0]),
            request("several", input=texts, user="me"),
            request("ids", input=ids[1]),
            request("lists", input=ids[:2]),
            request("single", input=texts[:1]),
            request("cut", input=texts[0], dimensions=5),
            request("base64", input=texts, encoding_format="base64"),
        ],
    )
    asked = {
        **{"one": texts[:1], "several": texts, "ids": texts[1:2]},
        **{"lists": texts[:2], "single": texts[:1]},
    }
    for name, expected in asked.items():
        line = found[name]
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        body = CreateEmbeddingResponse.model_validate(line["response"]["body"])
        assert [one.index for one in body.data] == list(range(len(expected)))
        for one, text in zip(body.data, expected, strict=True):
            assert one.embedding == pytest.approx(vector(model, text).tolist(), abs=1e-5)
        tokens = sum(len(tokenizer(text)["input_ids"]) for text in expected)
        assert body.usage.prompt_tokens == body.usage.total_tokens == tokens
    assert found["one"]["response"]["body"]["model"] == "tiny"
    (cut,) = found["cut"]["response"]["body"]["data"]
    assert cut["embedding"] == pytest.approx(vector(model, texts[0], 5).tolist(), abs=1e-5)
    encoded = found["base64"]["response"]["body"]["data"]
    for one, text in zip(encoded, texts, strict=True):
        decoded = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
        assert decoded.tolist() == pytest.approx(vector(model, text).tolist(), abs=1e-5)


def test_invalid_embedding_requests_name_the_reason(tmp_path: Path, model: Path) -> None:
    bad = {
        "url": ("invalid_request", request("url", "/v1/completions", prompt="x")),
        "none": ("invalid_request", request("none")),
        "number": ("invalid_request", request("number", input=5)),
        "empty": ("invalid_request", request("empty", input=[])),
        "mixed": ("invalid_request", request("mixed", input=["a", 5])),
        "wide": ("invalid_request", request("wide", input="a", dimensions=99)),
        "format": ("invalid_request", request("format", input="a", encoding_format="hex")),
        "field": ("unsupported_parameter", request("field", input="a", temperature=1)),
        "blank": ("empty_prompt", request("blank", input=["a", " "])),
        "long": ("prompt_too_long", request("long", input="x" * 600)),
    }
    good = request("good", input="a")
    found = answers(tmp_path, model, [good, *(line for _, line in bad.values())])
    assert found["good"]["response"]["status_code"] == 200
    for name, (code, _) in bad.items():
        response = found[name]["response"]
        assert (name, response["body"]["error"]["code"]) == (name, code)
        assert response["status_code"] == 400
    said = found["blank"]["response"]["body"]["error"]["message"]
    assert said == "prompt 1: body.input is empty or whitespace only"


def test_embedding_requests_are_not_merged_with_the_previous_one(
    tmp_path: Path, model: Path
) -> None:
    lines = [request(name, input=name) for name in ("a", "a", "b")]
    lines[1]["body"]["prompt_index"] = 1
    answers(tmp_path, model, lines)
    first, second, third = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert len(json.loads(first)["response"]["body"]["data"]) == 1
    assert json.loads(second)["error"]["code"] == "duplicate_custom_id"
    assert json.loads(third)["response"]["status_code"] == 200


def test_first_request_decides_the_kind_of_a_batch_file(tmp_path: Path) -> None:
    path, line = tmp_path / "batch.jsonl", json.dumps(request("a", input="x"))
    path.write_text(f"\n{line}\nnot json\n")
    assert first_url(str(path)) == URL
    for broken in ("not json", "[]", "5", '{"url": "/v1/nothing"}', '{"url": ["x"]}'):
        path.write_text(f"{broken}\n{line}\n")
        assert first_url(str(path)) == URL
    path.write_text("not json\n")
    assert first_url(str(path)) is None
    path.write_text("")
    assert first_url(str(path)) is None
    assert first_url(str(tmp_path / "nowhere.jsonl")) is None
