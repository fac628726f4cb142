"""Writes OpenAI's output files of a job from its finished parts.

The parts hold all data of these files, so a missing or damaged file is written again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from datetime import datetime
from functools import cache
from pathlib import PurePath
from typing import Any, BinaryIO, cast

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
        kept: output column of each kept input column.
        combined_output: a path, or an open file such as a pipe, that gets all lines of both files.

    Raises:
        DataError: a part cannot be read.
        StorageError: a file cannot be written.
    """
    with storage_errors(out.openai):
        out.files.make_directory(out.openai)
    responses = _responses(manifest, model)
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
    """Writes lines to a file that appears when it is finished, or at once to an open file."""

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
        """Write buffered lines; a second call does nothing."""
        with storage_errors(self.path):
            self._file.close()


def _rows(out: OutputDir, kept: Mapping[str, str], part: Part) -> Iterator[dict[str, Any]]:
    """Yield the rows of a finished part for ``Responses.line``."""
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


def _responses(manifest: Manifest, model: ModelSpec) -> Responses:
    tokenizer = cache(lambda: _load_tokenizer(model))  # loaded when the first token is decoded
    return Responses(
        manifest.fingerprint,
        int(datetime.fromisoformat(manifest.planned_at).timestamp()),
        model.served_names[0],
        lambda token, before: token_text(tokenizer(), token, before),
        normalizes=(manifest.job.get("embed") or {}).get("normalize", True),
    )


def _load_tokenizer(model: ModelSpec) -> Any:
    from batchinfer.builders.tokenizer import make_tokenizer  # slow, because it imports torch

    return make_tokenizer(model.config())
