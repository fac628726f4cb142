"""``/v1/classify``, ``/v1/score`` and ``/v1/rerank`` in OpenAI batch files.

Shapes are vLLM's: ``ClassificationRequest``, ``ScoreRequest``, ``RerankRequest`` and their
responses (vllm/entrypoints/pooling/classify and scoring, protocol.py, serving.py). A line with
several texts or pairs is several rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from batchinfer.console.format import did_you_mean, format_value, printable
from batchinfer.errors import RowError
from batchinfer.job.input.formats.openai_prompts import (
    CLASSIFY_URLS,
    RERANK_URLS,
    SCORE_KEYS,
    SCORE_URLS,
    score_keys,
)
from batchinfer.job.openai.embeddings import NO_EFFECT, one_text
from batchinfer.job.openai.request import ParsedRequest, check_model, checked_body, invalid

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"add_special_tokens": (True,), "use_activation": (True,)}
_OF_CLASSIFY = ("input", *_NEUTRAL, *NO_EFFECT)
_TEXTS = tuple(dict.fromkeys(name for keys in SCORE_KEYS for name in keys))
_OF_SCORE = ("use_activation", *_TEXTS, *NO_EFFECT)
_OF_RERANK = ("query", "documents", "top_n", "return_documents", "use_activation", *NO_EFFECT)

Row = Mapping[str, Any]


def pair_fields(columns: tuple[str, str]) -> dict[str, str]:
    """What errors call the columns of pairs, and what is said to who made the request."""
    query, document = columns
    return {f"column {query}": "body: the query", f"column {document}": "body: the document"}


def parse_classification(
    line: Mapping[str, Any],
    served_names: Sequence[str] | None,
    adapters: Collection[str] = (),
    *,
    has_tools: bool = False,
) -> ParsedRequest:
    """Prompt and model of a line that asks for labels; arguments and errors as of
    ``parse_embedding``."""
    given = _given(line, CLASSIFY_URLS, served_names, adapters, _OF_CLASSIFY)
    return ParsedRequest(*one_text(given.get("input")), {}, given.get("model"))


def parse_pair(
    line: Mapping[str, Any],
    served_names: Sequence[str] | None,
    adapters: Collection[str] = (),
    *,
    has_tools: bool = False,
) -> ParsedRequest:
    """Pair and model of a line that asks for a score or for documents in order; arguments and
    errors as of ``parse_embedding``."""
    keys: tuple[str, str] | None = ("query", "documents")
    if line.get("url") in RERANK_URLS:
        given = _given(line, RERANK_URLS, served_names, adapters, _OF_RERANK)
        top_n, shown = given.get("top_n", 0), given.get("return_documents", True)
        if type(top_n) is not int or top_n < 0:
            raise invalid(f"body.top_n is {format_value(top_n)}; it must be 0 (all) or more")
        if not isinstance(shown, bool):
            raise invalid(f"body.return_documents is {format_value(shown)}; it must be a boolean")
    else:
        given = _given(line, (*SCORE_URLS, *RERANK_URLS), served_names, adapters, _OF_SCORE)
        keys = score_keys(given)
    if keys is None:
        raise invalid("body has no text_1 and text_2 (or queries and documents)")
    if others := [name for name in given if name in _TEXTS and name not in keys]:
        raise invalid(f"body has {keys[0]} and {keys[1]}, and {others[0]} too; leave it out")
    pair = tuple(_text_of_pair(given, name) for name in keys)
    return ParsedRequest("pair", pair, {}, given.get("model"))


def _given(
    line: Mapping[str, Any],
    urls: Sequence[str],
    served_names: Sequence[str] | None,
    adapters: Collection[str],
    known: Sequence[str],
) -> Mapping[str, Any]:
    """The body of a line, without nulls, checked but for its texts."""
    body = checked_body(line, urls)
    check_model(body.get("model"), served_names, adapters)
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            hint = did_you_mean(name, known)
            raise RowError(
                "unsupported_parameter", f"body.{printable(name, 60)} is not supported{hint}"
            )
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise RowError(
                "unsupported_parameter", f"body.{name} is {format_value(value)}: not supported"
            )
    return given


def _text_of_pair(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    text = one.get("text") if isinstance(one, Mapping) else one
    if isinstance(text, str):
        return text
    raise invalid(
        f"body.{name} is {format_value(value)}; it must be a text, or of texts one or as many as "
        "there are others"
    )


def classification_body(rows: Sequence[Row], **facts: Any) -> dict[str, Any]:
    """The body of a response.

    Args:
        rows: one for each text or pair: ``body`` as the request had it, ``label``, ``score``,
            ``scores``, ``num_prompt_tokens``.
        facts: what the body says besides.
    """
    data = [
        {
            "index": at,
            "label": row["label"],
            "probs": [one["score"] for one in row["scores"]],
            "num_classes": len(row["scores"]),
        }
        for at, row in enumerate(rows)
    ]
    return {**facts, "object": "list", "data": data, "usage": _usage(rows)}


def score_body(rows: Sequence[Row], **facts: Any) -> dict[str, Any]:
    """As ``classification_body``, of pairs."""
    data = [{"index": at, "object": "score", "score": row["score"]} for at, row in enumerate(rows)]
    return {**facts, "object": "list", "data": data, "usage": _usage(rows)}


def rerank_body(rows: Sequence[Row], **facts: Any) -> dict[str, Any]:
    """As ``classification_body``, of a query with documents: the ``top_n`` best first."""
    body = rows[0]["body"] or {}
    order = sorted(range(len(rows)), key=lambda at: -rows[at]["score"])
    shown = body.get("return_documents") is not False
    results = [
        {
            "index": at,
            **({"document": {"text": _document(rows[at])}} if shown else {}),
            "relevance_score": rows[at]["score"],
        }
        for at in order[: body.get("top_n") or len(order)]
    ]
    names = ("id", "model")
    return {**{name: facts[name] for name in names}, "results": results, "usage": _usage(rows)}


def _document(row: Row) -> str:
    return _text_of_pair(row["body"] or {}, "documents")


def _usage(rows: Sequence[Row]) -> dict[str, int]:
    tokens = sum(row["num_prompt_tokens"] for row in rows)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


_BODIES: Mapping[str, tuple[str, Callable[..., dict[str, Any]]]] = {
    **dict.fromkeys(CLASSIFY_URLS, ("classify", classification_body)),
    **dict.fromkeys(SCORE_URLS, ("score", score_body)),
    **dict.fromkeys(RERANK_URLS, ("rerank", rerank_body)),
}
"""How the ids of a url's responses begin, and what makes their bodies."""


def scored_body(rows: Sequence[Row], key: str, **facts: Any) -> dict[str, Any] | None:
    """The body of a response to a request for labels or scores; None: it is for something else.

    Args:
        key: of its id.
    """
    begins, make = _BODIES.get(str(rows[0]["url"]), ("", None))
    return None if make is None else make(rows, id=f"{begins}-{key}", **facts)
