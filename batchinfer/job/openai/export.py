"""Writes a job's OpenAI output and error files from its finished parts.

The parts hold all the data of these files, so a missing or damaged file can be written again. Ids
are hashes of the job and the row, so that writing a file again gives the same bytes.

Lines have the fields of OpenAI's batch output and of its ``chat.completion``, ``text_completion``
and ``error`` objects. A request that OpenAI would refuse gets a response with an HTTP status and
the error in its body. A request that fails for any other reason gets an error and no response.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from itertools import accumulate
from pathlib import PurePath
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import from_json, to_json

from batchinfer.job.input.openai_batch import CHAT, prompt_index
from batchinfer.job.manifest import Manifest
from batchinfer.job.openai.batch_names import for_run_batch
from batchinfer.job.openai.pooling import pooling_body
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.records.export_record import is_open_file
from batchinfer.job.output.schema import RESPONSE_COLUMNS
from batchinfer.job.row_ranges import Part
from batchinfer.job.spec.spec import ModelSpec
from batchinfer.job.storage.filesystem import publish, storage_errors
from batchinfer.text.detokenize import MAX_CHAR_TOKENS, token_text

_GENERATED = ("row_id", "num_prompt_tokens", "error")
_OPTIONAL = (
    *("outputs", "num_output_tokens", "num_reasoning_tokens", "prompt_logprobs"),
    *("embedding", "label", "score", "scores"),
)

_NO_RESPONSE = frozenset(
    {
        *("crashed_engine", "nan_logits", "does_not_fit"),
        *("invalid_json", "invalid_utf8", "row_too_large", "duplicate_custom_id"),
    }
)
"""Error codes that get no response: those for lines that are not valid requests, and those for
failures that the request did not cause.
"""

TokenText = Callable[[int, Sequence[int]], str]
"""Function that returns the text that a token adds to the text of the tokens before it."""


def export(
    out: OutputDir,
    manifest: Manifest,
    kept: Mapping[str, str],
    model: ModelSpec,
    combined_output: PurePath | None,
) -> None:
    """Write the OpenAI output and error files of a job whose parts are all finished.

    Args:
        kept: maps each kept input column to its output column.
        combined_output: a path, or an open file such as a pipe, that receives all lines of both
            files for a user of ``run-batch``; None for no such file.

    Raises:
        DataError: a part cannot be read.
        StorageError: a file cannot be written.
    """
    with storage_errors(out.openai):
        out.files.make_directory(out.openai)
    rename = str if combined_output is None else for_run_batch
    responses = _responses(manifest, model, rename)
    with ExitStack() as stack:

        def add_file(path: PurePath, name: str) -> _LineFile:
            return stack.enter_context(closing(_LineFile(out, path, out.staging / name)))

        output, errors = (add_file(p, f"openai-{at}") for at, p in enumerate(out.openai_files))
        combined = [add_file(path, "both") for path in filter(None, [combined_output])]
        for rows in _requests(row for part in manifest.parts() for row in _rows(out, kept, part)):
            line = to_json(responses.line(rows), inf_nan_mode="null") + b"\n"
            has_failed = any(row["error"] for row in rows)
            for file in (errors if has_failed else output, *combined):
                file.add(line)
        record = {file.path.name: file.finish() for file in (output, errors)}
        out.write_json(out.openai_record, record)
        for file in combined:
            file.finish()


class _LineFile:
    """Writes lines to a staged file, which ``finish`` publishes, or directly to an open file."""

    def __init__(self, out: OutputDir, path: PurePath, staged: PurePath) -> None:
        self.path = path
        self._out = out
        self._staged = None if is_open_file(path) else staged
        self._digest, self._size = hashlib.sha256(), 0
        with storage_errors(path):
            self._file: BinaryIO = (
                cast(BinaryIO, open(path, "ab"))  # noqa: SIM115 - closed in close()
                if self._staged is None
                else out.files.create(self._staged)
            )

    def add(self, line: bytes) -> None:
        with storage_errors(self.path):
            self._file.write(line)
        self._digest.update(line)
        self._size += len(line)

    def finish(self) -> dict[str, Any]:
        """Publish the file; return its size and hash."""
        self.close()
        if self._staged is not None:
            publish(self._out.files, self._staged, self.path)
        return {"size": self._size, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        """Write buffered lines and close the file; a second call does nothing."""
        with storage_errors(self.path):
            self._file.close()


def _rows(out: OutputDir, kept: Mapping[str, str], part: Part) -> Iterator[dict[str, Any]]:
    names = {kept[name]: name for name in RESPONSE_COLUMNS}
    table, cached = out.read_part(part), _cached_tokens(out, part)
    optional = [name for name in _OPTIONAL if name in table.schema.names and name not in names]
    for batch in table.select([*names, *_GENERATED, *optional]).to_batches(max_chunksize=1024):
        for row in batch.to_pylist():
            renamed = {names.get(name, name): value for name, value in row.items()}
            body = None if renamed["body"] is None else from_json(renamed["body"])
            yield {
                **renamed,
                "body": body if isinstance(body, dict) else None,
                "cached_tokens": cached.get(renamed["row_id"]),
            }


def _requests(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Group rows by request; the prompts of a request are consecutive rows."""
    request: list[dict[str, Any]] = []
    for row in rows:
        same_id = bool(request) and request[-1]["custom_id"] == row["custom_id"]
        if request and not (same_id and prompt_index(row["body"])):
            yield request
            request = []
        request.append(row)
    if request:
        yield request


def _cached_tokens(out: OutputDir, part: Part) -> dict[int, int]:
    with suppress(OSError, pa.ArrowException), out.files.open(out.request_stats(part)) as file:
        table = pq.read_table(file, columns=["row_id", "cached_tokens"])
        row_ids, cached = (table.column(name).to_pylist() for name in table.column_names)
        return dict(zip(row_ids, cached, strict=True))
    return {}


def _responses(manifest: Manifest, model: ModelSpec, rename: Callable[[str], str]) -> Responses:
    tokenizer = cache(lambda: _load_tokenizer(model))  # loaded when the first token is decoded
    return Responses(
        manifest.fingerprint,
        int(datetime.fromisoformat(manifest.planned_at).timestamp()),
        model.served_names[0],
        lambda token, before: token_text(tokenizer(), token, before),
        normalizes=(manifest.job.get("embed") or {}).get("normalize", True),
        rename=rename,
    )


def _load_tokenizer(model: ModelSpec) -> Any:
    from batchinfer.builders.tokenizer import make_tokenizer  # slow, because it imports torch

    return make_tokenizer(model.config())


@dataclass(frozen=True)
class Responses:
    fingerprint: str
    created: int
    """Time when the job was planned, in seconds since 1970."""
    model: str
    """Model name in the responses to requests that name no model."""
    token_text: TokenText
    normalizes: bool = True
    """True if embeddings are scaled to unit norm."""
    rename: Callable[[str], str] = str
    """Replaces names in the messages of errors."""

    def line(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the output or error line of a request.

        Args:
            rows: one for each prompt. A row has ``custom_id``, ``url`` and ``body`` of the request,
                ``cached_tokens`` (None if unknown), and the generated columns.
        """
        key = hashlib.sha256(f"{self.fingerprint} {rows[0]['row_id']}".encode()).hexdigest()
        error = _first_error([row["error"] for row in rows])
        if error is not None:
            error = {**error, "message": self.rename(error["message"])}
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
    """Texts of the prompt's tokens. This field and the fields below are set only if
    log-probabilities were requested."""
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
    # The first token has no log-probability, so its id is unknown. The token's text is what remains
    # of the prompt's text before the texts of all later tokens.
    rest = "".join(texts)
    first = text.removesuffix(rest) if text.endswith(rest) else ""
    top = [_top_logprobs(t, ids, token_text) for t, ids in zip(scored, before, strict=True)]
    return _Echo(text, [first, *texts], [None, *(t["logprob"] for t in scored)], [None, *top])


def _top_logprobs(
    token: Mapping[str, Any], before: Sequence[int], token_text: TokenText
) -> dict[str, float]:
    return {token_text(other["token_id"], before): other["logprob"] for other in token["top"]}


def _tokens_before(tokens: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return, for each token, the ids of up to ``MAX_CHAR_TOKENS`` tokens before it."""
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
    """Return a request's first error, with the prompt's index unless all prompts have the same
    error."""
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
