"""Reads requests for embeddings, labels and scores, and makes their responses.

Bodies of ``/v1/embeddings`` have the fields of OpenAI and vLLM (``EmbeddingCompletionRequest`` in
vllm/entrypoints/openai/protocol.py). ``/v1/classify``, ``/v1/score`` and ``/v1/rerank`` follow
vLLM's ``ClassificationRequest``, ``ScoreRequest`` and ``RerankRequest`` (protocol.py and serving.py
in vllm/entrypoints/pooling/classify and scoring). A request with several texts or pairs becomes
several rows.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from batchinfer.console.format import format_value
from batchinfer.job.input.openai_batch import (
    CLASSIFY_URLS,
    EMBEDDINGS,
    RERANK_URLS,
    SCORE_KEYS,
    SCORE_URLS,
    score_keys,
)
from batchinfer.job.openai.request import (
    NO_EFFECT,
    ParsedRequest,
    RequestKind,
    check_fields,
    invalid,
    one_prompt,
)

Body = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]
"""The rows of a request, one for each text or pair. Each row has the request's ``body``,
``num_prompt_tokens``, and the columns of the job's task.
"""

_NEUTRAL = {"add_special_tokens": (True,)}
_TEXTS = tuple(dict.fromkeys(name for keys in SCORE_KEYS for name in keys))
_INPUT_FIELDS = {"column prompt": "body.input", "column token_ids": "body.input"}


def embedding_requests(width: int) -> RequestKind:
    """Return the ``RequestKind`` of embedding requests; ``width`` limits their ``dimensions``."""
    return RequestKind((EMBEDDINGS,), partial(_parse_embedding, width=width), _INPUT_FIELDS)


def classification_requests() -> RequestKind:
    return RequestKind(CLASSIFY_URLS, _parse_classification, _INPUT_FIELDS)


def pair_requests(query: str, document: str) -> RequestKind:
    """Return the ``RequestKind`` of requests that score pairs of texts or rank documents.

    Args:
        query: name of the job's query column.
        document: name of the job's document column.
    """
    fields = {f"column {query}": "body: the query", f"column {document}": "body: the document"}
    return RequestKind((*SCORE_URLS, *RERANK_URLS), _parse_pair, fields, (query, document))


def _parse_embedding(url: str, body: Body, *, width: int) -> ParsedRequest:
    check_fields(body, ("input", "dimensions", "encoding_format", *_NEUTRAL, *NO_EFFECT), _NEUTRAL)
    dimensions = body.get("dimensions", width)
    if type(dimensions) is not int or not 1 <= dimensions <= width:
        what = format_value(dimensions)
        raise invalid(f"body.dimensions is {what}; it must be a whole number from 1 to {width}")
    encoding = body.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        what = format_value(encoding)
        raise invalid(f"body.encoding_format is {what}; it must be float or base64")
    return _parse_input(body)


def _parse_classification(url: str, body: Body) -> ParsedRequest:
    neutral = {**_NEUTRAL, "use_activation": (True,)}
    check_fields(body, ("input", *neutral, *NO_EFFECT), neutral)
    return _parse_input(body)


def _parse_input(body: Body) -> ParsedRequest:
    source, value = one_prompt(body, "input")
    if not value and source == "token_ids":
        raise invalid(
            "body.input is []; it must be a string, a list of token ids, or a list of either"
        )
    return ParsedRequest(source, value, model=body.get("model"))


def _parse_pair(url: str, body: Body) -> ParsedRequest:
    neutral = {"use_activation": (True,)}
    keys: tuple[str, str] | None = ("query", "documents")
    if url in RERANK_URLS:
        known = ("query", "documents", "top_n", "return_documents", *neutral, *NO_EFFECT)
        check_fields(body, known, neutral)
        top_n, shown = body.get("top_n", 0), body.get("return_documents", True)
        if type(top_n) is not int or top_n < 0:
            raise invalid(f"body.top_n is {format_value(top_n)}; it must be 0 (all) or more")
        if not isinstance(shown, bool):
            raise invalid(
                f"body.return_documents is {format_value(shown)}; it must be true or false"
            )
    else:
        check_fields(body, (*_TEXTS, *neutral, *NO_EFFECT), neutral)
        keys = score_keys(body)
    if keys is None:
        raise invalid("body needs text_1 and text_2 (or queries and documents)")
    if others := [name for name in body if name in _TEXTS and name not in keys]:
        raise invalid(f"body has {others[0]} besides {keys[0]} and {keys[1]}; leave it out")
    pair = tuple(_text_of_pair(body, name) for name in keys)
    return ParsedRequest("pair", pair, model=body.get("model"))


def _text_of_pair(body: Body, name: str) -> str:
    value = body.get(name)
    item = value[0] if isinstance(value, list) and len(value) == 1 else value
    text = item.get("text") if isinstance(item, Mapping) else item
    if isinstance(text, str):
        return text
    raise invalid(
        f"body.{name} is {format_value(value)}; it must be a string, a list of one "
        "string, or a list as long as the other list"
    )


def pooling_body(
    rows: Rows, key: str, *, created: int, model: str, normalizes: bool
) -> dict[str, Any] | None:
    """Return the body of the response to a request; None if the request asks for generated text.

    Args:
        key: suffix of the response's id.
        created: seconds since 1970.
        normalizes: True to scale truncated embeddings to unit norm.
    """
    url = rows[0]["url"]
    if url in RERANK_URLS:
        tokens = _usage(rows)
        return {"id": f"rerank-{key}", "model": model, "results": _ranked(rows), "usage": tokens}
    if url == EMBEDDINGS:
        prefix, data = "embd", _embeddings(rows, normalizes=normalizes)
    elif url in CLASSIFY_URLS:
        prefix, data = "classify", _labels(rows)
    elif url in SCORE_URLS:
        prefix, data = "score", _scores(rows)
    else:
        return None
    return {
        "id": f"{prefix}-{key}",
        "created": created,
        "model": model,
        "object": "list",
        "data": data,
        "usage": _usage(rows),
    }


def _embeddings(rows: Rows, *, normalizes: bool) -> list[dict[str, Any]]:
    body = rows[0]["body"] or {}
    dimensions, as_base64 = body.get("dimensions"), body.get("encoding_format") == "base64"
    vectors = [_truncated(row["embedding"], dimensions, normalizes) for row in rows]
    values = [_base64(vector) if as_base64 else vector.tolist() for vector in vectors]
    return [
        {"object": "embedding", "index": index, "embedding": value}
        for index, value in enumerate(values)
    ]


def _truncated(values: Sequence[float], dimensions: int | None, normalizes: bool) -> Any:
    """Return the first ``dimensions`` numbers of an embedding as float32. With ``normalizes``,
    scale a shortened vector to unit norm."""
    vector = np.asarray(values, dtype=np.float32)
    if dimensions is None or dimensions >= len(vector):
        return vector
    vector = vector[:dimensions]
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector / np.float32(max(length, 1e-12)) if normalizes else vector


def _base64(vector: Any) -> str:
    """Encode numbers as little-endian float32 in base64, as OpenAI does."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _labels(rows: Rows) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "label": row["label"],
            "probs": [label["score"] for label in row["scores"]],
            "num_classes": len(row["scores"]),
        }
        for index, row in enumerate(rows)
    ]


def _scores(rows: Rows) -> list[dict[str, Any]]:
    return [
        {"index": index, "object": "score", "score": row["score"]} for index, row in enumerate(rows)
    ]


def _ranked(rows: Rows) -> list[dict[str, Any]]:
    body = rows[0]["body"] or {}
    ranking = sorted(range(len(rows)), key=lambda index: -rows[index]["score"])
    results: list[dict[str, Any]] = []
    for index in ranking[: body.get("top_n") or len(ranking)]:
        result: dict[str, Any] = {"index": index}
        if body.get("return_documents") is not False:
            result["document"] = {"text": _text_of_pair(rows[index]["body"] or {}, "documents")}
        results.append({**result, "relevance_score": rows[index]["score"]})
    return results


def _usage(rows: Rows) -> dict[str, int]:
    tokens = sum(row["num_prompt_tokens"] for row in rows)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
