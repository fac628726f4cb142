"""Turns finished rows into lines of OpenAI's output file and error file.

Lines have the fields of OpenAI's batch output and of its ``chat.completion``, ``text_completion``
and ``error`` objects. A request that OpenAI would refuse gets a response with an HTTP status and
the error in its body. A request without an answer gets an error and no response. Ids are hashes of
the job and the row, so that writing a file again gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from batchinfer.job.input.openai_batch import CHAT
from batchinfer.job.openai.pooling import pooling_body
from batchinfer.text.detokenize import MAX_CHAR_TOKENS

_NO_RESPONSE = frozenset(
    {
        *("crashed_engine", "nan_logits", "does_not_fit"),
        *("invalid_json", "invalid_utf8", "row_too_large", "duplicate_custom_id"),
    }
)
"""Codes of errors for lines that are not requests, and for failures that no request caused."""

TokenText = Callable[[int, Sequence[int]], str]
"""Returns the text that a token adds to the tokens before it."""


@dataclass(frozen=True)
class Responses:
    """Makes the lines of a job's rows."""

    fingerprint: str
    created: int
    """Time when the job was planned, in seconds since 1970."""
    model: str
    """Model name for answers to requests that name none."""
    token_text: TokenText
    normalizes: bool = True
    """True if embeddings have length 1."""

    def line(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the line of a request.

        Args:
            rows: one for each prompt. A row has ``custom_id``, ``url`` and ``body`` of the request,
                ``cached_tokens`` (None if unknown), and the generated columns.
        """
        key = hashlib.sha256(f"{self.fingerprint} {rows[0]['row_id']}".encode()).hexdigest()
        error = _first_error([row["error"] for row in rows])
        response = None
        if error is None:
            response = {"status_code": 200, "body": self._body(rows, key[:24])}
        elif error["code"] not in _NO_RESPONSE:
            response = _refusal(error)
        return {
            "id": f"batch_req_{key[:24]}",
            "custom_id": rows[0]["custom_id"],
            "response": response and {"request_id": key[24:56], **response},
            "error": None if response else error,
        }

    def _body(self, rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
        first = rows[0]
        model = (first["body"] or {}).get("model") or self.model
        pooled = pooling_body(
            rows, key, created=self.created, model=model, normalizes=self.normalizes
        )
        if pooled is not None:
            return pooled
        is_chat = first["url"] == CHAT
        prompt, output = (
            sum(row[f"num_{kind}_tokens"] for row in rows) for kind in ("prompt", "output")
        )
        cached = [row["cached_tokens"] or 0 for row in rows]
        choices = [
            self._message(sample) if is_chat else self._text(row, sample)
            for row in rows
            for sample in row["outputs"]
        ]
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{key}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": self.created,
            "model": model,
            "choices": [{**choice, "index": at} for at, choice in enumerate(choices)],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": output,
                "total_tokens": prompt + output,
                "prompt_tokens_details": {"cached_tokens": sum(cached)},
                **_reasoning_usage(rows),
            },
            "system_fingerprint": None,
        }

    def _message(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        logprobs = None
        if (tokens := sample["logprobs"]) is not None:
            content = list(map(self._chat_token, tokens, _tokens_before(tokens)))
            logprobs = {"content": content, "refusal": None}
        return {
            "index": sample["index"],
            "message": {"role": "assistant", **_content(sample), "refusal": None},
            "logprobs": logprobs,
            "finish_reason": _chat_finish_reason(sample),
        }

    def _chat_token(self, token: Mapping[str, Any], before: Sequence[int]) -> dict[str, Any]:
        top = [self._token_logprob(other, before) for other in token["top"]]
        return {**self._token_logprob(token, before), "top_logprobs": top}

    def _token_logprob(self, token: Mapping[str, Any], before: Sequence[int]) -> dict[str, Any]:
        text = self.token_text(token["token_id"], before)
        return {"token": text, "logprob": token["logprob"], "bytes": list(text.encode())}

    def _text(self, row: Mapping[str, Any], sample: Mapping[str, Any]) -> dict[str, Any]:
        echo = _echo(row, self.token_text)
        tokens = sample["logprobs"]
        return {
            "index": sample["index"],
            "text": echo.text + sample["text"],
            "logprobs": None if tokens is None else self._text_logprobs(echo, tokens),
            "finish_reason": sample["finish_reason"],
        }

    def _text_logprobs(self, echo: _Echo, tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        texts, top = list(echo.tokens), list(echo.top_logprobs)
        for token, before in zip(tokens, _tokens_before(tokens), strict=True):
            texts.append(self.token_text(token["token_id"], before))
            top.append(_top_logprobs(token, before, self.token_text))
        return {
            "tokens": texts,
            "token_logprobs": [*echo.logprobs, *(token["logprob"] for token in tokens)],
            "top_logprobs": top,
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=0))[: len(texts)],
        }


@dataclass(frozen=True)
class _Echo:
    """A prompt that an answer repeats before its text; empty unless the request sets ``echo``."""

    text: str = ""
    tokens: Sequence[str] = ()
    """Texts of the prompt's tokens. The fields from here on are set only with log-probabilities."""
    logprobs: Sequence[float | None] = ()
    """Log-probability of each token; None for the first, which follows no other token."""
    top_logprobs: Sequence[Mapping[str, float] | None] = field(default=())


def _echo(row: Mapping[str, Any], token_text: TokenText) -> _Echo:
    body = row["body"] or {}
    if not body.get("echo"):
        return _Echo()
    text = body["prompt"]
    if isinstance(text, list) and text and isinstance(text[0], str | list):
        text = text[0]  # a list with a single prompt
    if not isinstance(text, str):
        text = "".join(token_text(id_, _ids_before(text, at)) for at, id_ in enumerate(text))
    if row.get("prompt_logprobs") is None:
        return _Echo(text)
    scored = row["prompt_logprobs"][1:]
    before = _tokens_before(scored)
    texts = [token_text(t["token_id"], ids) for t, ids in zip(scored, before, strict=True)]
    # The first token has no log-probability, so its id is unknown. Its text is the prompt's text
    # before the other tokens' texts.
    rest = "".join(texts)
    first = text.removesuffix(rest) if text.endswith(rest) else ""
    top = [_top_logprobs(t, ids, token_text) for t, ids in zip(scored, before, strict=True)]
    return _Echo(text, [first, *texts], [None, *(t["logprob"] for t in scored)], [None, *top])


def _top_logprobs(
    token: Mapping[str, Any], before: Sequence[int], token_text: TokenText
) -> dict[str, float]:
    return {token_text(other["token_id"], before): other["logprob"] for other in token["top"]}


def _tokens_before(tokens: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return for each token the ids before it, as many as a character can span."""
    ids = [token["token_id"] for token in tokens]
    return [_ids_before(ids, at) for at in range(len(ids))]


def _ids_before(ids: Sequence[int], at: int) -> list[int]:
    return list(ids[max(at - MAX_CHAR_TOKENS, 0) : at])


def _content(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message's text, tool calls and reasoning, under vLLM's new and old field names."""
    content: dict[str, Any] = {"content": sample["text"]}
    if calls := sample.get("tool_calls"):
        content = {"content": sample["text"] or None, "tool_calls": calls}
    if "reasoning" in sample:
        content |= {"reasoning": sample["reasoning"], "reasoning_content": sample["reasoning"]}
    return content


def _chat_finish_reason(sample: Mapping[str, Any]) -> str:
    reason: str = sample["finish_reason"]
    return "tool_calls" if reason == "stop" and sample.get("tool_calls") else reason


def _reasoning_usage(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if "num_reasoning_tokens" not in rows[0]:
        return {}
    tokens = sum(row["num_reasoning_tokens"] for row in rows)
    return {"completion_tokens_details": {"reasoning_tokens": tokens}}


def _first_error(errors: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """Return a request's first error, with the prompt's number unless all prompts have it."""
    at, error = next(((at, each) for at, each in enumerate(errors) if each is not None), (0, None))
    is_of_all = all(each == error for each in errors)
    if error is None or is_of_all or error["code"] == "duplicate_custom_id":
        return error
    return {**error, "message": f"prompt {at}: {error['message']}"}


def _refusal(error: Mapping[str, Any]) -> dict[str, Any]:
    status, kind = 400, "invalid_request_error"
    if error["code"] == "unknown_model":
        status, kind = 404, "not_found_error"
    body = {"error": {**error, "type": kind, "param": None}}
    return {"status_code": status, "body": body}
