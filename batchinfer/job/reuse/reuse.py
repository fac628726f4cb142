"""Reuses finished rows of other outputs (``output.reuse``).

``RowReuse`` removes rows whose keys are in its index of finished rows. Rows are removed before the
remaining rows are split into windows, so the removed rows never reach the engine. ``FoundRows``
holds the locations of the removed rows' answers. The thread that writes parts copies these answers,
file by file, and gives them the new row ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.console.format import counted_rows, first_line, listed, printable
from batchinfer.errors import DataError, RowError, UsageError
from batchinfer.job.fingerprint import answer_facts, differences
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.explode import whole_rows
from batchinfer.job.output.finished_row_segments import (
    CONTROL_TEXT_COLUMN,
    REQUEST_COLUMN,
    read_segment,
    segment_schema,
    with_keys,
)
from batchinfer.job.output.manifest_file import is_begun
from batchinfer.job.output.open import output_at
from batchinfer.job.output.records.part_record import PartRecord
from batchinfer.job.output.resume import plan_of
from batchinfer.job.row_ranges import Part
from batchinfer.job.rows.row_key import KEY_BYTES, KEY_COLUMN, KEY_TYPE, KEYS_SCHEMA
from batchinfer.job.storage.filesystem import read_file
from batchinfer.requests.requests import PromptRow

MOST_FOUND = 1 << 16
"""Number of found rows to collect before copying, so that one read of a file serves many rows."""
NOT_FOUND = -1
"""The file number that means that no file holds a row."""
_NO_KEY = bytes(KEY_BYTES)
_KEY = np.dtype(f"S{KEY_BYTES}")
"""NumPy type of a key. NumPy ignores trailing zero bytes, which is harmless because all keys have
the same length.
"""
_FOUND = pa.schema(
    [
        ("row_id", pa.int64()),
        (KEY_COLUMN, KEY_TYPE),
        (CONTROL_TEXT_COLUMN, pa.bool_()),  # describes the row's input, not its answer
        ("file", pa.int32()),
        ("source", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows that were found in other outputs, with the file and the old row id of each answer."""

    table: pa.Table


class KeyIndex:
    """Sorted keys, each with a file and a row id in that file: 28 bytes per row.

    Args:
        files: a table of keys (``KEYS_SCHEMA``) for each file. If several rows have the same key,
            the index keeps the first row.
    """

    def __init__(self, files: Iterable[pa.Table]) -> None:
        tables = list(files)
        keys = np.frombuffer(b"".join(map(_key_bytes, tables)), _KEY)
        sizes = [table.num_rows for table in tables]
        numbers = np.repeat(np.arange(len(tables), dtype=np.int32), sizes)
        row_ids = np.concatenate([np.empty(0, np.int64), *(t["row_id"].to_numpy() for t in tables)])
        self._keys, first = np.unique(keys, return_index=True)
        self._files, self._row_ids = numbers[first], row_ids[first]

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._files.nbytes + self._row_ids.nbytes

    def find(
        self, keys: Sequence[bytes | None]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return each key's file number and row id; for an unknown key or None, the file number is
        ``NOT_FOUND``."""
        if not len(self):
            return np.full(len(keys), NOT_FOUND, np.int32), np.zeros(len(keys), np.int64)
        wanted = np.frombuffer(b"".join(_NO_KEY if key is None else key for key in keys), _KEY)
        at = np.minimum(np.searchsorted(self._keys, wanted), len(self) - 1)
        is_found = (self._keys[at] == wanted) & [key is not None for key in keys]
        return np.where(is_found, self._files[at], np.int32(NOT_FOUND)), self._row_ids[at]


def _key_bytes(table: pa.Table) -> bytes:
    chunks = table[KEY_COLUMN].chunks
    return b"".join(
        memoryview(chunk.buffers()[1])[
            KEY_BYTES * chunk.offset : KEY_BYTES * (chunk.offset + len(chunk))
        ]
        for chunk in chunks
        if len(chunk)
    )


def open_outputs(paths: Sequence[str], own: OutputDir | None) -> list[OutputDir]:
    """Open the outputs that ``output.reuse`` names.

    Args:
        own: the output of this job, which ``paths`` must not contain; None skips this check.

    Raises:
        UsageError: a path does not hold a batchinfer output, or is the output of this job.
        StorageError: an output cannot be read.
    """
    outputs = []
    for path in paths:
        shown = printable(path)
        out = output_at(path)
        if not is_begun(out):
            raise UsageError(
                f"output.reuse: {shown} holds no batchinfer output",
                hint="give the folder that output.path of the other job names",
            )
        if own is not None and own.files.holds(own.root, str(out.manifest)):
            raise UsageError(
                f"output.reuse: {shown} is the output of this job",
                hint="leave it out: a run keeps its own finished rows",
            )
        outputs.append(out)
    return outputs


class RowReuse:
    """Finds rows that other outputs have already finished, and copies their answers.

    Args:
        outputs: the outputs to search, in order.
        generated: the generated columns of the job.
        warn: called with a line for each damaged file.

    Raises:
        DataError: the manifest of an output is damaged.
        StorageError: a file cannot be read.
    """

    def __init__(
        self, outputs: Sequence[OutputDir], generated: pa.Schema, warn: Callable[[str], None]
    ) -> None:
        self.num_reused = 0
        self._plans: list[tuple[OutputDir, Manifest]] = [(out, plan_of(out)) for out in outputs]
        keyed = list(chain.from_iterable(keyed_files(out, plan) for out, plan in self._plans))
        self._files: list[FinishedFile] = [file for file, _ in keyed]
        self._index = KeyIndex(keys for _, keys in keyed)
        self._is_whole: dict[int, bool] = {}
        """Results of ``_check``, keyed by file number."""
        self._latest: tuple[int, pa.Table] | None = None
        self._generated = generated
        self._warn = warn

    def without_found(
        self,
        batches: Iterator[list[PromptRow]],
        hand_over: Callable[[FoundRows], None],
    ) -> Iterator[list[PromptRow]]:
        """Yield the rows that must run, and collect the found rows for ``hand_over``.

        Args:
            batches: rows with keys.
            hand_over: called with at least ``MOST_FOUND`` found rows at a time, except at the end.
        """
        waiting = _FOUND.empty_table()
        for batch in batches:
            found, rest = self._split(batch)
            waiting = pa.concat_tables([waiting, found])
            if waiting.num_rows >= MOST_FOUND:
                hand_over(FoundRows(waiting))
                waiting = _FOUND.empty_table()
            if rest:
                yield rest
        if waiting.num_rows:
            hand_over(FoundRows(waiting))

    def copied(self, found: FoundRows) -> Iterator[pa.Table]:
        """Yield the rows with their answers, as one table per file with the columns of a segment.

        Raises:
            DataError: a file has been damaged since its rows were found.
            StorageError: a file cannot be read.
        """
        for file in pc.unique(found.table["file"]).to_pylist():
            of_file = found.table.filter(pc.equal(found.table["file"], file))
            yield self._copied_from(file, of_file)

    def why_none(self, facts: Mapping[str, Any], num_rows: int) -> Iterator[str]:
        """For each output, yield a line that says why none of its rows was reused.

        Args:
            facts: ``fingerprint_facts`` of this job.
            num_rows: number of rows that were looked up.
        """
        for out, plan in self._plans:
            none = f"0 of {counted_rows(num_rows)} reused from {printable(str(out.root))}"
            try:
                changed = differences(answer_facts(plan.job), answer_facts(facts))
            except (KeyError, TypeError, AttributeError):
                changed = {"the version of its manifest": (None, None)}
            names = [key.removeprefix("model_facts.") for key in changed]
            if names:
                what = "model" if all(key.startswith("model") for key in changed) else "job"
                yield f"{none}: {what} differs: {listed(names)}"
            elif not len(self._index):
                why = (
                    "the output has no finished rows, or an earlier version wrote them without keys"
                )
                yield f"{none}: {why}"
            else:
                yield f"{none}: prompts or sampling parameters differ"

    def _split(self, batch: list[PromptRow]) -> tuple[pa.Table, list[PromptRow]]:
        files, sources = self._index.find([row.key for row in batch])
        for file in np.unique(files[files != NOT_FOUND]).tolist():
            if not self._check(file):
                files[files == file] = NOT_FOUND
        places = zip(files.tolist(), sources.tolist(), strict=True)
        place_of = {row.row_id: place for row, place in zip(batch, places, strict=True)}
        rest = [row for row in batch if place_of[row.row_id][0] == NOT_FOUND]
        found = [row for row in batch if place_of[row.row_id][0] != NOT_FOUND]
        self.num_reused += len(found)
        columns = [
            [row.row_id for row in found],
            [row.key for row in found],
            [_has_control_text(row) for row in found],
            [place_of[row.row_id][0] for row in found],
            [place_of[row.row_id][1] for row in found],
        ]
        return pa.table(columns, schema=_FOUND), rest

    def _check(self, file: int) -> bool:
        """Return True if a file is intact; if it is damaged, warn that its rows are run again."""
        if file not in self._is_whole:
            try:
                self._files[file].check()
                self._is_whole[file] = True
            except DataError as error:
                self._is_whole[file] = False
                self._warn(f"a damaged file is not reused; its rows are computed again: {error}")
        return self._is_whole[file]

    def _copied_from(self, file: int, found: pa.Table) -> pa.Table:
        table, sources = self._table(file), found["source"].to_numpy()
        row_ids = table["row_id"].to_numpy()
        at = np.minimum(np.searchsorted(row_ids, sources), max(0, len(row_ids) - 1))
        if not len(row_ids) or not np.array_equal(row_ids[at], sources):
            raise DataError(
                f"{self._files[file].path} lacks some of the rows that its list of keys names"
            )
        answers = table.take(pa.array(at)).combine_chunks()
        schema = segment_schema(self._generated)
        nothing = pa.nulls(len(found), schema.field(REQUEST_COLUMN).type)
        replaced = {REQUEST_COLUMN: nothing} | {
            name: found[name] for name in ("row_id", KEY_COLUMN, CONTROL_TEXT_COLUMN)
        }
        arrays = [replaced[name] if name in replaced else answers[name] for name in schema.names]
        return pa.table(arrays, schema=schema)

    def _table(self, file: int) -> pa.Table:
        """Return a file's generated columns; cache the latest, because it is often needed again."""
        if self._latest is None or self._latest[0] != file:
            self._latest = None  # free the old table before reading the next; both may be large
            try:
                self._latest = file, self._files[file].read(self._generated.names)
            except DataError as error:
                hint = "run the job again to compute the rows of the damaged file"
                raise DataError(str(error), hint=hint) from None
        return self._latest[1]


def _has_control_text(row: PromptRow) -> bool:
    return not isinstance(row.prompt, RowError) and row.prompt.has_control_text


@dataclass(frozen=True)
class FinishedFile:
    out: OutputDir
    path: PurePath
    record: PartRecord | None
    """Record of a part; None for a segment, whose file name contains its hash."""

    def check(self) -> None:
        """Check that the file has not changed since it was written.

        Raises:
            DataError: the file is damaged or missing.
            StorageError: the file cannot be read, but may be intact.
        """
        if self.record is None:
            self._bytes()
            return
        found = self.out.check_size(self.path, self.record.size)
        if found.etag is None or found.etag != self.record.etag:
            self.out.check_hash(self.path, self.record.sha256)

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read ``columns`` as a table with one row for each input row, sorted by row id."""
        try:
            reader = pa.BufferReader(self._bytes())
            table = pq.read_table(reader, columns=list(columns), use_threads=False)
            return whole_rows(table).select(columns)
        except (pa.ArrowException, KeyError) as error:
            raise DataError(f"{self.path} cannot be read: {first_line(error)}") from None

    def _bytes(self) -> bytes:
        try:
            if self.record is None:
                return read_segment(self.out.files, self.path)
            data = read_file(self.out.files, self.path)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path} cannot be read: {first_line(error)}") from None
        if hashlib.sha256(data).hexdigest() != self.record.sha256:
            raise DataError(f"{self.path} has changed since it was written (its hash differs)")
        return data


Keyed = tuple[FinishedFile, pa.Table]
"""A file, and a table of its rows' keys (``KEYS_SCHEMA``)."""


def keyed_files(out: OutputDir, plan: Manifest) -> Iterator[Keyed]:
    """Yield intact files of ``out`` with the keys of their rows."""
    # List segments before parts, so that rows moved from a segment to a part are not missed.
    segments = list(out.files.entries(out.segments))
    for found in out.of_each(partial(_part, out), plan.parts()):
        if found is not None:
            yield found
    for path in segments:
        keys = _segment_keys(out, path)
        if keys is not None:
            yield FinishedFile(out, path, None), keys


def _part(out: OutputDir, part: Part) -> Keyed | None:
    try:
        record = out.read_record(part)
    except DataError:
        return None
    keys = None if record is None else out.read_keys(part, record)
    return None if keys is None else (FinishedFile(out, out.part_file(part), record), keys)


def _segment_keys(out: OutputDir, path: PurePath) -> pa.Table | None:
    try:
        reader = pa.BufferReader(read_segment(out.files, path))
        table = with_keys(pq.read_table(reader, use_threads=False))
    except (OSError, ValueError, pa.ArrowException):
        return None
    good = table.filter(pc.and_(pc.equal(table["status"], "ok"), table[KEY_COLUMN].is_valid()))
    return good.select(KEYS_SCHEMA.names)
