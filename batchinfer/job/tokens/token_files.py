"""Reads and writes files that hold the tokens of unfinished rows.

A file holds all tokens of its rows, or only the tokens drawn since the previous file.

A run writes ``<run id>-<number>-<hash of its bytes>.parquet`` into ``_batchinfer/tokens``. A
damaged file only costs time: this module ignores it and all later increments of its requests. The
file's metadata names its plan. Each increment of a request's tokens holds the key of the row and
the number of the chain.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePath

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from batchinfer.engine.output_tracker import OutputIncrement
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.parquet_bytes import parquet_bytes
from batchinfer.job.row_ranges import sorted_row_ids, within
from batchinfer.job.run_ids import writer_of
from batchinfer.job.storage.filesystem import read_file, storage_errors
from batchinfer.job.tokens.in_flight import TokenUpdate
from batchinfer.job.tokens.resume_pace import RunPace
from batchinfer.job.tokens.token_tables import SCHEMA, KeptOutput, RequestId, from_table, to_table

_NAME = re.compile(r"(?P<run>run-\d+(?:-[a-z]\w*)?)-\d{6,}-(?P<digest>[0-9a-f]+)\.parquet")
_PLAN = b"batchinfer.plan"
_PACES = TypeAdapter(RunPace)
_PACE = b"batchinfer.pace"


class TokenFiles:
    """The token files of an output directory, read and written by one run.

    Args:
        adapters: maps each adapter's name to its number. Requests refer to the numbers, so files
            that were written with other numbers are ignored.
    """

    def __init__(
        self, out: OutputDir, plan: Manifest, adapters: Mapping[str, int], run_id: str
    ) -> None:
        self._out = out
        self._plan = f"{plan.fingerprint} {plan.planned_at} {sorted(adapters.items())}".encode()
        self._run_id = run_id
        self._num_written = 0
        self._sizes: dict[PurePath, int] = {}
        """Size in bytes of each file in use that this writer may delete."""
        self.bytes_written = 0

    @property
    def size(self) -> int:
        return sum(self._sizes.values())

    def recover(
        self, missing: Sequence[range], other_writers: Collection[str] | None = None
    ) -> tuple[dict[RequestId, KeptOutput], RunPace | None]:
        """Return the tokens that earlier runs kept, and the pace of the last run that stored one.

        The pace is None if no file stores one. If no kept tokens are needed, delete the token
        files.

        Args:
            missing: the unfinished rows that this run computes, in order.
            other_writers: writers whose files this function ignores; it then deletes no file,
                because these writers may need it. None if this run is the only writer.
        """
        kept: dict[RequestId, KeptOutput] = {}
        pace: RunPace | None = None
        for path in self._out.files.entries(self._out.tokens):
            run, writer = run_of_tokens(path.name), writer_of(run_of_tokens(path.name))
            if run == self._run_id or writer in (other_writers or ()):
                continue
            size, increments, of_run = self._read(path)
            if of_run is not None:
                pace = of_run
            if other_writers is None and self._out.writer in ("", writer):
                self._sizes[path] = size
            row_ids = sorted_row_ids(increment.row_id for increment in increments)
            needed = set(within(row_ids, missing).tolist())
            for increment in increments:
                if increment.row_id in needed:
                    _add(kept, run, increment)
        if not kept and other_writers is None:
            self._delete(list(self._sizes))
        return kept, pace

    def write(self, update: TokenUpdate) -> None:
        """Write tokens to disk, then delete the files that they replace.

        If the process dies in between, the next run reads all files: the new file's chains replace
        the chains of the older files.
        """
        replaced = list(self._sizes) if update.replaces_all else []
        if update.increments:
            metadata = {_PLAN: self._plan, _PACE: _PACES.dump_json(update.pace)}
            table = to_table(update.increments).replace_schema_metadata(metadata)
            data = parquet_bytes([table])
            name = f"{self._run_id}-{self._num_written:06d}-{_digest(data)}.parquet"
            self._num_written += 1
            self._out.write(self._out.tokens / name, data)
            self._sizes[self._out.tokens / name] = len(data)
            self.bytes_written += len(data)
        self._delete(replaced)

    def _delete(self, paths: Iterable[PurePath]) -> None:
        for path in paths:
            with storage_errors(path, "delete"):
                self._out.files.delete(path)
            del self._sizes[path]

    def _read(self, path: PurePath) -> tuple[int, list[OutputIncrement], RunPace | None]:
        """Return a file's size, its increments, and the pace of its run, which older versions did
        not store; (0, [], None) if the file is damaged or has another plan."""
        named = _NAME.fullmatch(path.name)
        try:
            data = read_file(self._out.files, path)
            if named is None or _digest(data) != named["digest"]:
                return 0, [], None
            with pq.ParquetFile(pa.BufferReader(data)) as reader:
                metadata = reader.metadata.metadata or {}
                if metadata.get(_PLAN) != self._plan or not reader.schema_arrow.equals(SCHEMA):
                    return 0, [], None
                pace = _pace_from(metadata.get(_PACE))
                return len(data), list(from_table(reader.read(use_threads=False))), pace
        except (OSError, pa.ArrowException):
            return 0, [], None


def _pace_from(stored: bytes | None) -> RunPace | None:
    try:
        return None if stored is None else _PACES.validate_json(stored)
    except ValidationError:
        return None


def _add(kept: dict[RequestId, KeptOutput], run: str, increment: OutputIncrement) -> None:
    request, chain = (increment.row_id, increment.number), (run, increment.chain)
    known = kept.get(request)
    if known is None or known.chain != chain:
        known = kept[request] = KeptOutput(increment.key, chain, increment.stats)
    known.add(increment)


def run_of_tokens(name: str) -> str:
    """Return the id of the run that wrote a token file; "" for other files."""
    named = _NAME.fullmatch(name)
    return named["run"] if named else ""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
