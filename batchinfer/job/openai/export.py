"""OpenAI output files of a job, made of its finished parts, each whole or not there.

They hold nothing that the parts do not: where one is missing or damaged, they are made again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from datetime import datetime
from functools import cache
from pathlib import PurePath
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import from_json, to_json

from batchinfer.job.input.openai_batch import prompt_index
from batchinfer.job.manifest import Manifest
from batchinfer.job.openai.response import Responses
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.export_record import is_open_file
from batchinfer.job.output.schema import RESPONSE_COLUMNS
from batchinfer.job.row_ids import Part
from batchinfer.job.spec.spec import ModelSpec
from batchinfer.job.storage.filesystem import publish, storage_errors
from batchinfer.text.detokenize import token_text

_GENERATED = ("row_id", "num_prompt_tokens", "error")
_OPTIONAL = (
    *("outputs", "num_output_tokens", "num_reasoning_tokens", "prompt_logprobs"),
    *("embedding", "label", "score", "scores"),
)


def export(
    out: OutputDir,
    manifest: Manifest,
    kept: Mapping[str, str],
    model: ModelSpec,
    combined_output: PurePath | None,
) -> None:
    """Write OpenAI's output and error files of a job whose parts are all finished.

    Args:
        kept: the output column of each input column that is kept.
        combined_output: a file for the lines of both, beside them, or what is open already, like
            a pipe; None: there is none.

    Raises:
        DataError: a part cannot be read.
        StorageError: the file system refuses.
    """
    with storage_errors(out.openai):
        out.files.make_directory(out.openai)
    responses = _responses(manifest, model)
    with ExitStack() as stack:
        output, errors = (
            stack.enter_context(closing(_StagedFile(out, path, out.staging / f"openai-{at}")))
            for at, path in enumerate(out.openai_files)
        )
        combined = [
            stack.enter_context(closing(_combined(out, path)))
            for path in filter(None, [combined_output])
        ]
        for rows in _requests(row for part in manifest.parts() for row in _rows(out, kept, part)):
            line = to_json(responses.line(rows), inf_nan_mode="null") + b"\n"
            has_failed = any(row["error"] for row in rows)
            for file in (errors if has_failed else output, *combined):
                file.add(line)
        record = {file.final.name: file.finish() for file in (output, errors)}
        out.write_json(out.openai_record, record)
        for file in combined:
            file.finish()


class _File(Protocol):
    def add(self, data: bytes) -> None: ...
    def finish(self) -> object: ...
    def close(self) -> None: ...


def _combined(out: OutputDir, path: PurePath) -> _File:
    return _OpenFile(path) if is_open_file(path) else _StagedFile(out, path, out.staging / "both")


class _OpenFile:
    """A file that others have open, like a pipe: it is added to, line by line."""

    def __init__(self, path: PurePath) -> None:
        self._path = path
        with storage_errors(path):
            self._file: BinaryIO = open(path, "ab")  # noqa: SIM115 - closed in close()

    def add(self, data: bytes) -> None:
        with storage_errors(self._path):
            self._file.write(data)

    def finish(self) -> None:
        self.close()

    def close(self) -> None:
        with storage_errors(self._path):
            self._file.close()


class _StagedFile:
    """A file that is staged, and appears when it is finished."""

    def __init__(self, out: OutputDir, final: PurePath, staged: PurePath) -> None:
        self.final = final
        self._out = out
        self._staged = staged
        self._digest = hashlib.sha256()
        self._size = 0
        with storage_errors(final):
            self._file = out.files.create(self._staged)

    def add(self, data: bytes) -> None:
        with storage_errors(self.final):
            self._file.write(data)
        self._digest.update(data)
        self._size += len(data)

    def finish(self) -> dict[str, Any]:
        """Make the file appear; its size and hash."""
        self.close()
        publish(self._out.files, self._staged, self.final)
        return {"size": self._size, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        """Write what is left; a second call does nothing."""
        with storage_errors(self.final):
            self._file.close()


def _rows(out: OutputDir, kept: Mapping[str, str], part: Part) -> Iterator[dict[str, Any]]:
    """Rows of a finished part, as ``Responses`` takes them."""
    names = {kept[name]: name for name in RESPONSE_COLUMNS}
    table, cached = out.read_part(part), _cached_tokens(out, part)
    optional = [name for name in _OPTIONAL if name in table.schema.names and name not in names]
    for batch in table.select([*names, *_GENERATED, *optional]).to_batches(max_chunksize=1024):
        for row in batch.to_pylist():
            found = {names.get(name, name): value for name, value in row.items()}
            body = None if found["body"] is None else from_json(found["body"])
            yield {
                **found,
                "body": body if isinstance(body, dict) else None,
                "cached_tokens": cached.get(found["row_id"]),
            }


def _requests(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Rows by request: those of one with several prompts come one after another."""
    request: list[dict[str, Any]] = []
    for row in rows:
        goes_on = prompt_index(row["body"]) and request
        if goes_on and request[-1]["custom_id"] == row["custom_id"]:
            request.append(row)
            continue
        if request:
            yield request
        request = [row]
    if request:
        yield request


def _cached_tokens(out: OutputDir, part: Part) -> dict[int, int]:
    """Prompt tokens of rows that were computed before; of none where that is not known any more."""
    with suppress(OSError, pa.ArrowException), out.files.open(out.request_stats(part)) as file:
        table = pq.read_table(file, columns=["row_id", "cached_tokens"])
        row_ids, cached = (table.column(name).to_pylist() for name in table.column_names)
        return dict(zip(row_ids, cached, strict=True))
    return {}


def _responses(manifest: Manifest, model: ModelSpec) -> Responses:
    return Responses(
        manifest.fingerprint,
        _created(manifest),
        model.served_names[0],
        _token_texts(model),
        normalizes=(manifest.job.get("embed") or {}).get("normalize", True),
    )


def _created(manifest: Manifest) -> int:
    return int(datetime.fromisoformat(manifest.planned_at).timestamp())


def _token_texts(model: ModelSpec) -> Callable[[int, Sequence[int]], str]:
    """Decodes single tokens; the tokenizer is loaded for the first."""
    tokenizer = cache(lambda: _load_tokenizer(model))
    return lambda token, before: token_text(tokenizer(), token, before)


def _load_tokenizer(model: ModelSpec) -> Any:
    from batchinfer.builders.tokenizer import make_tokenizer  # imports torch

    return make_tokenizer(model.config())
