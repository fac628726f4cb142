"""What OpenAI batch files ask for, and their lines with a prompt, a text or a pair each.

Pairs are those of vLLM's ``ScoreRequest`` and ``RerankRequest``
(vllm/entrypoints/pooling/scoring/protocol.py), the latter as Jina and Cohere have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
"""The ``url`` of requests for answers to conversations, and to texts."""
EMBEDDINGS = "/v1/embeddings"
"""The ``url`` of requests for embeddings."""
CLASSIFY_URLS = ("/v1/classify", "/classify")
"""Of requests for labels."""
SCORE_URLS = ("/v1/score", "/score")
"""Of requests for scores of pairs."""
RERANK_URLS = ("/v1/rerank", "/v2/rerank", "/rerank")
"""Of requests for documents in the order of their scores with a query."""
KNOWN_URLS = frozenset({CHAT, COMPLETIONS, EMBEDDINGS, *CLASSIFY_URLS, *SCORE_URLS, *RERANK_URLS})
PROMPT_INDEX = "prompt_index"
"""Key that a body gets here: the place of its prompt among those of its request."""
SCORE_KEYS = (
    *(("text_1", "text_2"), ("data_1", "data_2")),
    *(("queries", "documents"), ("queries", "items")),
)
"""Names of a pair's two texts, or of several."""


def parts_of_body(url: object, body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What replaces keys of a request's body to make each of its several prompts a request; nothing
    where it has one, or none that can be told apart."""
    if url in SCORE_URLS:
        return _pairs(body)
    of_texts = url == EMBEDDINGS or url in CLASSIFY_URLS
    key = "documents" if url in RERANK_URLS else "input" if of_texts else "prompt"
    parts = body.get(key)
    kinds = str | dict if url in RERANK_URLS else str | list
    if not isinstance(parts, list) or len(parts) < 2:
        return []
    return [{key: part} for part in parts] if all(isinstance(p, kinds) for p in parts) else []


def score_keys(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """The names of the two texts in the body of a request for scores, by vLLM's several."""
    return next((keys for keys in SCORE_KEYS if all(name in body for name in keys)), None)


def _pairs(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    keys = score_keys(body)
    if keys is None:
        return []
    ones, others = (_listed(body[name]) for name in keys)
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others) or len(ones) < 2:
        return []
    return [dict(zip(keys, pair, strict=True)) for pair in zip(ones, others, strict=True)]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
