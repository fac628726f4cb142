"""``/v1/embeddings`` in OpenAI batch files: a line as a prompt, finished rows as a response.

Shapes are those of OpenAI's API and of vLLM's (``EmbeddingCompletionRequest`` in
vllm/entrypoints/openai/protocol.py). A line with several texts is several rows.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from batchinfer.console.format import did_you_mean, format_value, printable
from batchinfer.errors import RowError
from batchinfer.job.input.formats.openai_prompts import EMBEDDINGS
from batchinfer.job.openai.request import ParsedRequest, check_model, checked_body, invalid

NO_EFFECT = ("model", "user", "priority", "request_id")
"""Fields of requests that change nothing."""
_KNOWN = ("input", "dimensions", "encoding_format", "add_special_tokens", *NO_EFFECT)
EMBEDDING_FIELDS = {"column prompt": "body.input", "column token_ids": "body.input"}
"""What errors call the columns of prompts, and what requests for embeddings call them."""
_ENCODINGS = ("float", "base64")


def parse_embedding(
    line: Mapping[str, Any],
    served_names: Sequence[str] | None,
    adapters: Collection[str] = (),
    *,
    width: int,
    has_tools: bool = False,
) -> ParsedRequest:
    """Prompt and model that a line asks for.

    Args:
        line: the object in the line, of one text.
        served_names: what a body's ``model`` may be; None: anything.
        adapters: what it may be as well, in full.
        width: numbers of an embedding, the most that ``dimensions`` may be.
        has_tools: without effect.

    Raises:
        RowError: ``invalid_request``, ``unknown_model``, ``unsupported_parameter``.
    """
    body = checked_body(line, (EMBEDDINGS,))
    check_model(body.get("model"), served_names, adapters)
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in _KNOWN:
            raise RowError(
                "unsupported_parameter",
                f"body.{printable(name, 60)} is not supported{did_you_mean(name, _KNOWN)}",
            )
    if given.get("add_special_tokens") not in (None, True):
        raise RowError("unsupported_parameter", "body.add_special_tokens is false: not supported")
    dimensions = given.get("dimensions", width)
    if type(dimensions) is not int or not 1 <= dimensions <= width:
        what = format_value(dimensions)
        raise invalid(f"body.dimensions is {what}; it must be a whole number from 1 to {width}")
    if given.get("encoding_format", "float") not in _ENCODINGS:
        what = format_value(given["encoding_format"])
        raise invalid(f"body.encoding_format is {what}; it must be float or base64")
    source, value = one_text(given.get("input"))
    return ParsedRequest(source, value, {}, given.get("model"))


def one_text(value: Any) -> tuple[str, Any]:
    """Where a request's ``input`` goes, a text or token ids, and what it is.

    Raises:
        RowError: ``invalid_request``.
    """
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return "prompt", value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return "token_ids", value
    raise invalid(
        f"body.input is {format_value(value)}; it must be a text or a list of token ids, or a "
        "list of such"
    )


def embeddings_body(
    rows: Sequence[Mapping[str, Any]], *, normalizes: bool, **facts: Any
) -> dict[str, Any]:
    """The body of a response.

    Args:
        rows: one for each text: ``body`` as the request had it, ``embedding``,
            ``num_prompt_tokens``.
        normalizes: whether embeddings have length 1, also when they are cut.
        facts: what the body says besides.
    """
    body = rows[0]["body"] or {}
    dimensions, as_base64 = body.get("dimensions"), body.get("encoding_format") == "base64"
    vectors = [_cut(row["embedding"], dimensions, normalizes) for row in rows]
    tokens = sum(row["num_prompt_tokens"] for row in rows)
    return {
        **facts,
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": at,
                "embedding": _encoded(vector) if as_base64 else vector.tolist(),
            }
            for at, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _cut(values: Sequence[float], dimensions: int | None, normalizes: bool) -> Any:
    """float32 [dimensions] of an embedding, which keeps its length of 1."""
    vector = np.asarray(values, dtype=np.float32)
    if dimensions is None or dimensions >= len(vector):
        return vector
    vector = vector[:dimensions]
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector / np.float32(max(length, 1e-12)) if normalizes else vector


def _encoded(vector: Any) -> str:
    """Little-endian float32, as OpenAI encodes them."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
