"""OpenAI batch files for embeddings, classes, scores and rankings, with tiny random models."""

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

from batchinfer.errors import UsageError
from batchinfer.job.input.openai_batch import first_url, parts_of_body
from tests.classifiers import logits, make_classifier
from tests.models import make_text_model
from tests.openai_batches import answers, request

URL = "/v1/embeddings"


def embed(custom_id: str, **body: Any) -> dict[str, Any]:
    return request(custom_id, URL, **body)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model without an output head."""
    folder = make_text_model(tmp_path_factory.mktemp("model") / "tiny", tie_word_embeddings=False)
    AutoModel.from_pretrained(folder).save_pretrained(folder)
    return folder


def vector(model: Path, text: str, dimensions: int | None = None) -> Any:
    """Return transformers' embedding as float32, scaled to unit norm."""
    inputs = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt")
    reference = AutoModel.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        found = reference(**inputs).last_hidden_state[0, -1, :dimensions].numpy()
    return found / np.linalg.norm(found)


def test_embedding_answers_have_openai_format(tmp_path: Path, model: Path) -> None:
    texts = ["is it so?", "another text", "<|im_end|>"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    found = answers(
        tmp_path,
        model,
        [
            embed("one", model="tiny", input=texts[0]),
            embed("several", input=texts, user="me"),
            embed("ids", input=ids[1]),
            embed("lists", input=ids[:2]),
            embed("single", input=texts[:1]),
            embed("cut", input=texts[0], dimensions=5),
            embed("base64", input=texts, encoding_format="base64"),
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
        "none": ("invalid_request", embed("none")),
        "number": ("invalid_request", embed("number", input=5)),
        "empty": ("invalid_request", embed("empty", input=[])),
        "mixed": ("invalid_request", embed("mixed", input=["a", 5])),
        "wide": ("invalid_request", embed("wide", input="a", dimensions=99)),
        "format": ("invalid_request", embed("format", input="a", encoding_format="hex")),
        "field": ("unsupported_parameter", embed("field", input="a", temperature=1)),
        "blank": ("empty_prompt", embed("blank", input=["a", " "])),
        "long": ("prompt_too_long", embed("long", input="x" * 600)),
    }
    good = embed("good", input="a")
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
    lines = [embed(name, input=name) for name in ("a", "a", "b")]
    lines[1]["body"]["prompt_index"] = 1
    answers(tmp_path, model, lines)
    first, second, third = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert len(json.loads(first)["response"]["body"]["data"]) == 1
    assert json.loads(second)["error"]["code"] == "duplicate_custom_id"
    assert json.loads(third)["response"]["status_code"] == 200


def test_first_request_decides_the_kind_of_a_batch_file(tmp_path: Path) -> None:
    path, line = tmp_path / "batch.jsonl", json.dumps(embed("a", input="x"))
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


# Scores and classes


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory, text_model: Path) -> Path:
    return make_classifier(tmp_path_factory.mktemp("one") / "tiny", text_model, num_labels=1)


def test_score_and_rerank_requests(tmp_path: Path, reranker: Path) -> None:
    texts = ["it is so", "he did", "nobody knows"]
    wanted = [float(logits(reranker, "who?", text).sigmoid()) for text in texts]
    several = {"text_1": ["who?"] * 3, "text_2": texts}
    bad = {
        "uneven": request("uneven", "/v1/score", queries=["a", "b"], items=["c", "d", "e"]),
        "none": request("none", "/v1/score", text_1="a"),
        "no query": request("no query", "/v1/rerank", documents=["a", "b"]),
        "no document": request("no document", "/v1/rerank", query="a", documents=[]),
        "number": request("number", "/v1/rerank", query="a", documents=["b", "c"], top_n=-1),
        "shown": request("shown", "/v1/rerank", query="a", documents="b", return_documents=1),
        "field": request("field", "/v1/rerank", query="a", documents=["b"], top_k=1),
        "raw": request("raw", "/v1/score", text_1="a", text_2="b", use_activation=False),
        "blank": request("blank", "/v1/rerank", query="a", documents=["b", " "]),
        "null": request("null", "/v1/rerank", query="a", documents=[None]),
        "both": request("both", "/v1/score", text_1="a", text_2="b", queries="c"),
        "other": request("other", "/v1/classify", input="a"),
    }
    documents = [texts[0], {"text": texts[1]}, texts[2]]
    found = answers(
        tmp_path,
        reranker,
        [
            request("one", "/v1/score", data_1="who?", data_2=texts[0], model="tiny"),
            request("with each", "/score", queries="who?", documents=texts),
            request("each", "/v1/score", **several),
            request("all", "/v1/rerank", query="who?", documents=documents),
            request("best", "/v2/rerank", query="who?", documents=texts, top_n=1),
            request("hidden", "/rerank", query="who?", documents="he", return_documents=False),
            *bad.values(),
        ],
    )
    found = {name: line["response"]["body"] for name, line in found.items()}
    for name, count in (("one", 1), ("with each", 3), ("each", 3)):
        body = found[name]
        assert (body["object"], body["id"][:6]) == ("list", "score-")
        for at, (item, score) in enumerate(zip(body["data"], wanted[:count], strict=True)):
            assert (item["index"], item["object"]) == (at, "score")
            assert item["score"] == pytest.approx(score, abs=1e-5)
    assert found["one"]["usage"] == {"prompt_tokens": 14, "total_tokens": 14}
    assert found["one"]["model"] == "tiny"
    best_first = sorted(range(3), key=lambda at: -wanted[at])
    results = found["all"]["results"]
    assert [one["index"] for one in results] == best_first
    assert [one["document"]["text"] for one in results] == [texts[at] for at in best_first]
    assert [one["relevance_score"] for one in results] == pytest.approx(
        [wanted[at] for at in best_first], abs=1e-5
    )
    assert [one["index"] for one in found["best"]["results"]] == best_first[:1]
    assert list(found["hidden"]["results"][0]) == ["index", "relevance_score"]
    codes = {name: found[name]["error"]["code"] for name in bad}
    odd = {"field": "unsupported_parameter", "raw": "unsupported_parameter"}
    assert codes == dict.fromkeys(bad, "invalid_request") | odd | {"blank": "empty_prompt"}
    said = {name: found[name]["error"]["message"] for name in ("blank", "null", "both")}
    assert said["blank"] == "prompt 1: body: the document is empty or whitespace only"
    assert said["null"].startswith("body.documents is [null]; it must be a string")
    assert said["both"] == "body has queries besides text_1 and text_2; leave it out"


def test_classify_requests(tmp_path: Path, text_model: Path) -> None:
    labels = {0: "bad", 1: "so-so", 2: "good"}
    model = make_classifier(tmp_path / "tiny", text_model, id2label=labels)
    texts = ["it is so", "he did"]
    found = answers(
        tmp_path,
        model,
        [
            request("one", "/v1/classify", input=texts[0]),
            request("several", "/classify", input=texts),
            request("ids", "/v1/classify", input=[[0, 5, 6]]),
            request("none", "/v1/classify"),
            request("pair", "/v1/score", text_1="a", text_2="b"),
        ],
    )
    found = {name: line["response"]["body"] for name, line in found.items()}
    for at, item in enumerate(found["several"]["data"]):
        probs = logits(model, texts[at]).softmax(-1)
        assert item["probs"] == pytest.approx(probs.tolist(), abs=1e-5)
        assert (item["index"], item["num_classes"]) == (at, 3)
        assert item["label"] == labels[int(probs.argmax())]
    assert found["one"]["data"] == found["several"]["data"][:1]
    assert found["ids"]["usage"]["prompt_tokens"] == 3
    assert {found[name]["error"]["code"] for name in ("none", "pair")} == {"invalid_request"}
    (tmp_path / "pairs").mkdir()
    with pytest.raises(
        UsageError, match="has 3 labels, but requests for scores need a model with one label"
    ):
        answers(tmp_path / "pairs", model, [request("x", "/v1/rerank", query="a", documents=["b"])])


@pytest.mark.parametrize(
    ("url", "body", "parts"),
    [
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}, [("a", "b"), ("a", "c")]),
        ("/v1/score", {"text_1": ["a"], "text_2": ["b", "c"]}, [("a", "b"), ("a", "c")]),
        ("/v1/score", {"queries": ["a", "b"], "items": ["c", "d"]}, [("a", "c"), ("b", "d")]),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, []),
        ("/v1/score", {"text_1": ["a"], "text_2": "b"}, []),
        ("/v1/score", {"text_1": ["a"]}, []),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}, [("b",), ("c",)]),
        ("/v1/rerank", {"query": "a", "documents": ["b", 5]}, []),
        ("/v1/classify", {"input": ["a", [1, 2]]}, [("a",), ([1, 2],)]),
        ("/v1/embeddings", {"input": [1, 2]}, []),
        ("/v1/completions", {"prompt": ["a", "b"]}, [("a",), ("b",)]),
        (None, {"documents": ["a", "b"]}, []),
    ],
)
def test_score_request_is_split_into_prompts(url: Any, body: Any, parts: Any) -> None:
    assert [tuple(part.values()) for part in parts_of_body(url, body)] == parts
