"""OpenAI batch files of ``/v1/classify``, ``/v1/score`` and ``/v1/rerank``, as vLLM has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.config.options import BatchOptions
from batchinfer.errors import ExitCode, UsageError
from batchinfer.job.input.openai_batch import parts_of_body
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.verify import verify
from batchinfer.job.run.run_batch import run_batch
from tests.classifiers import logits, make_classifier
from tests.models import make_text_model


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory, text_model: Path) -> Path:
    return make_classifier(tmp_path_factory.mktemp("one") / "tiny", text_model, num_labels=1)


def request(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def answers(
    tmp_path: Path, model: Path, requests: list[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Bodies of the output by ``custom_id``."""
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
    assert verify(OutputDir(tmp_path / "answers.jsonl.batchinfer")).problems == []
    return {line["custom_id"]: line["response"]["body"] for line in found}


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
    assert said["both"] == "body has text_1 and text_2, and queries too; leave it out"


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
    for at, item in enumerate(found["several"]["data"]):
        probs = logits(model, texts[at]).softmax(-1)
        assert item["probs"] == pytest.approx(probs.tolist(), abs=1e-5)
        assert (item["index"], item["num_classes"]) == (at, 3)
        assert item["label"] == labels[int(probs.argmax())]
    assert found["one"]["data"] == found["several"]["data"][:1]
    assert found["ids"]["usage"]["prompt_tokens"] == 3
    assert {found[name]["error"]["code"] for name in ("none", "pair")} == {"invalid_request"}
    (tmp_path / "pairs").mkdir()
    with pytest.raises(UsageError, match="need a model with one label; this one has 3"):
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
