"""A finished row as a line of OpenAI's output file, or of its error file.

Shapes are those of OpenAI's batch output and of the API's ``chat.completion``,
``text_completion`` and ``error`` objects. As in OpenAI's, a request that the API would refuse has a
response, with an HTTP status and the error in its body; one that never came to an answer has no
response, but an error. Ids are hashes of the job and the row: the same whenever it is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from batchinfer.job.input.formats.openai_prompts import CHAT, EMBEDDINGS
from batchinfer.job.openai.echo import Echo, tokens_before
from batchinfer.job.openai.embeddings import embeddings_body
from batchinfer.job.openai.scores import scored_body

_NOT_FOUND, _BAD_REQUEST = 404, 400
_NO_RESPONSE = frozenset(
    {
        *("crashed_engine", "nan_logits", "does_not_fit"),
        *("invalid_json", "invalid_utf8", "row_too_large", "duplicate_custom_id"),
    }
)
"""Codes of lines that are no requests, and of faults that are not the request's."""
_ERROR_TYPE = {_NOT_FOUND: "not_found_error", _BAD_REQUEST: "invalid_request_error"}


@dataclass(frozen=True)
class Responses:
    """The lines of a job's rows in OpenAI's output files."""

    fingerprint: str
    created: int
    """Seconds since 1970 at which the job was planned."""
    model: str
    """The model's name in answers to requests that name none."""
    token_text: Callable[[int, Sequence[int]], str]
    """Text that a token adds to the tokens before it."""
    normalizes: bool = True
    """Whether embeddings have length 1."""

    def line(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The line of a request.

        Args:
            rows: one for each of its prompts: ``custom_id``, ``url``, ``body`` as the request had
                it, ``cached_tokens`` (None: not known) and the generated columns, with
                ``prompt_logprobs``, and with ``logprobs`` in ``outputs``.
        """
        key = hashlib.sha256(f"{self.fingerprint} {rows[0]['row_id']}".encode()).hexdigest()
        error = _first_error([row["error"] for row in rows])
        response = None
        if error is None:
            response = {"status_code": 200, "body": self._body(rows, key[:24])}
        elif error["code"] not in _NO_RESPONSE:
            status = _NOT_FOUND if error["code"] == "unknown_model" else _BAD_REQUEST
            response = {"status_code": status, "body": _error_body(error, status)}
        return {
            "id": f"batch_req_{key[:24]}",
            "custom_id": rows[0]["custom_id"],
            "response": response and {"request_id": key[24:56], **response},
            "error": None if response else error,
        }

    def _body(self, rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
        first = rows[0]
        model = (first["body"] or {}).get("model") or self.model
        if first["url"] == EMBEDDINGS:
            facts = {"id": f"embd-{key}", "created": self.created, "model": model}
            return embeddings_body(rows, normalizes=self.normalizes, **facts)
        scored = scored_body(rows, key, created=self.created, model=model)
        if scored is not None:
            return scored
        is_chat = first["url"] == CHAT
        prompt, output = (
            sum(row[f"num_{kind}_tokens"] for row in rows) for kind in ("prompt", "output")
        )
        cached = [row["cached_tokens"] or 0 for row in rows]
        samples = [(row, sample) for row in rows for sample in row["outputs"]]
        choices = [
            self._message(sample) if is_chat else self._text(row, sample) for row, sample in samples
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
        tokens = sample["logprobs"]
        return {
            "index": sample["index"],
            "message": {"role": "assistant", **_said(sample), "refusal": None},
            "logprobs": None
            if tokens is None
            else {
                "content": list(map(self._chat_token, tokens, tokens_before(tokens))),
                "refusal": None,
            },
            "finish_reason": _chat_finish_reason(sample),
        }

    def _chat_token(self, token: Mapping[str, Any], before: Sequence[int]) -> dict[str, Any]:
        top = [self._scored(other, before) for other in token["top"]]
        return {**self._scored(token, before), "top_logprobs": top}

    def _scored(self, token: Mapping[str, Any], before: Sequence[int]) -> dict[str, Any]:
        text = self.token_text(token["token_id"], before)
        return {"token": text, "logprob": token["logprob"], "bytes": list(text.encode())}

    def _text(self, row: Mapping[str, Any], sample: Mapping[str, Any]) -> dict[str, Any]:
        echo = Echo.of(row, self.token_text)
        tokens = sample["logprobs"]
        return {
            "index": sample["index"],
            "text": echo.text + sample["text"],
            "logprobs": None if tokens is None else self._text_logprobs(echo, tokens),
            "finish_reason": sample["finish_reason"],
        }

    def _text_logprobs(self, echo: Echo, tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        before = tokens_before(tokens)
        texts = [
            *echo.tokens,
            *(
                self.token_text(token["token_id"], ids)
                for token, ids in zip(tokens, before, strict=True)
            ),
        ]
        top = [
            {self.token_text(other["token_id"], ids): other["logprob"] for other in token["top"]}
            for token, ids in zip(tokens, before, strict=True)
        ]
        return {
            "tokens": texts,
            "token_logprobs": [*echo.logprobs, *(token["logprob"] for token in tokens)],
            "top_logprobs": [*echo.top_logprobs, *top],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=0))[: len(texts)],
        }


def _said(sample: Mapping[str, Any]) -> dict[str, Any]:
    """What a message says: its thinking under vLLM's name, and the one of earlier versions."""
    said: dict[str, Any] = {"content": sample["text"]}
    if calls := sample.get("tool_calls"):
        said = {"content": sample["text"] or None, "tool_calls": calls}
    if "reasoning" in sample:
        said |= {"reasoning": sample["reasoning"], "reasoning_content": sample["reasoning"]}
    return said


def _chat_finish_reason(sample: Mapping[str, Any]) -> str:
    reason: str = sample["finish_reason"]
    return "tool_calls" if reason == "stop" and sample.get("tool_calls") else reason


def _reasoning_usage(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if "num_reasoning_tokens" not in rows[0]:
        return {}
    tokens = sum(row["num_reasoning_tokens"] for row in rows)
    return {"completion_tokens_details": {"reasoning_tokens": tokens}}


def _first_error(errors: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """The first of the errors of a request's prompts, with that one's number unless it is of them
    all; None: there is none."""
    at, error = next(((at, each) for at, each in enumerate(errors) if each is not None), (0, None))
    is_of_all = all(each == error for each in errors)
    if error is None or is_of_all or error["code"] == "duplicate_custom_id":
        return error
    return {**error, "message": f"prompt {at}: {error['message']}"}


def _error_body(error: Mapping[str, Any], status: int) -> dict[str, Any]:
    kind = _ERROR_TYPE[status]
    return {"error": {**error, "type": kind, "param": None}}
