"""The output directory: its paths, its lock, and the check of finished parts.

``_batchinfer/manifest.json`` holds the plan of the job. A part is finished if its record
``_batchinfer/parts/part-N.json`` exists and its file matches the record (``commit`` writes both).
Finished rows of other parts are in ``_batchinfer/segments`` (``finished_row_segments``). Whether a
row is finished depends only on these records and segments.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.console.format import first_line
from batchinfer.errors import DataError
from batchinfer.job.output.parquet_bytes import parquet_bytes
from batchinfer.job.output.records.part_record import PartRecord, parse_record
from batchinfer.job.row_ranges import Part
from batchinfer.job.run_ids import run_id, run_number
from batchinfer.job.storage.filesystem import (
    Files,
    FileStat,
    LocalFiles,
    read_file,
    sha256_of,
    storage_errors,
    write_file,
)
from batchinfer.job.storage.local_lock import LocalLock, Lock

S = TypeVar("S")
T = TypeVar("T")
Access = Callable[[str, str], tuple[Files, Lock]]
Trust = Literal["nothing", "marks", "times"]
"""What is trusted to show that a finished part is unchanged. ``nothing``: the part is always read.
``marks``: the part's ETag in the object store. ``times``: the part's ETag or, in a file system
without ETags, its modification time."""


class OutputDir:
    """The paths of an output directory, and access to them.

    Methods raise StorageError if the file system refuses to read, write or delete a file.

    Args:
        files: the directory's file system; None for this machine's file system.
        lock: the directory's lock; None for a lock in this machine's file system.
        writer: this writer's name, which is part of the names of its runs, segments and staging
            folder; "" if one process writes alone.
        access: given a lock's name in ``_batchinfer`` and its holder's task, returns the file
            system to use under that lock, and the lock. None for ``files`` and a local lock.
        place: path at which readers will find the output; None for ``root``.
    """

    def __init__(
        self,
        root: PurePath,
        files: Files | None = None,
        lock: Lock | None = None,
        writer: str = "",
        access: Access | None = None,
        place: PurePath | None = None,
    ) -> None:
        self.root = root
        self.place = place or root
        self.writer = writer
        self.files = files or LocalFiles()
        self._access = access or (lambda *name: (self.files, LocalLock(Path(self.state), *name)))
        self.data = root / "data"
        self.stats = root / "stats"
        self.state: PurePath = root / "_batchinfer"
        self.lock = lock or LocalLock(Path(self.state))
        self.staging = self.state / "staging" / writer
        self.steps = self.state / "steps"
        self.requests = self.state / "requests"
        self.keys = self.state / "keys"
        self.runs = self.state / "runs"
        self.logs = self.state / "logs"
        self.parts = self.state / "parts"
        self.segments = self.state / "segments"
        self.tokens = self.state / "tokens"
        self.in_flight = self.state / "in_flight"
        self.live = self.state / "live"
        """Progress of the runs, written every few seconds."""
        self.locks = self.state / "locks"
        self.next = self.state / "next"
        """Folder in which updates write the next generation of the output."""
        self.swap = self.state / "swap.json"
        """File that exists during a swap, while the directory holds files of two generations."""
        self.claims = self.state / "claims"
        """Folder of files that list each writer's claimed parts (``batchinfer.job.claims``)."""
        self.shards = self.state / "shards.json"
        self.suspects = self.state / "suspects.json"
        self.kernels = self.state / "kernels.json"
        self.bad_ids = self.state / "bad_ids.parquet"
        self.manifest = self.state / "manifest.json"
        self.manifest_copy = self.state / "manifest-copy.json"
        self.file_records = (self.state / "files.json", self.state / "files-copy.json")
        self.openai = root / "openai"
        self.openai_files = (self.openai / "output.jsonl", self.openai / "errors.jsonl")
        self.openai_record = self.state / "openai.json"
        self.partitioned = root / "partitioned"
        self.partitioned_record = self.state / "partitioned.json"
        self.success = root / "_SUCCESS"
        self.summary = root / "summary.json"
        self.report = root / "report.html"

    @property
    def folders(self) -> tuple[PurePath, ...]:
        """Folders of a generation, which have no subfolders; the folder of part records is last."""
        results = (self.data, self.stats, self.openai)
        rows = (self.segments, self.requests, self.keys)
        runs = (self.steps, self.runs, self.logs, self.in_flight)
        return (*results, *rows, *runs, self.parts)

    @property
    def single_files(self) -> tuple[PurePath, ...]:
        """Files of a generation outside ``folders``, except ``success``; the plan is last."""
        results = (self.openai_record, self.summary, self.report, *self.file_records)
        notes = (self.suspects, self.kernels, self.bad_ids)
        return (*results, *notes, self.manifest_copy, self.manifest)

    def for_writer(self, writer: str) -> OutputDir:
        """Return the same directory for a writer, named by a letter, then letters and digits."""
        return OutputDir(self.root, self.files, self.lock, writer, self._access)

    def generation(self, name: str) -> OutputDir:
        """Return the directory of a next generation, which replaces this directory after an update.

        The holder of this directory's lock may write to the generation.
        """
        return OutputDir(
            self.next / name, self.files, self.lock, access=self._access, place=self.root
        )

    def under_lock(self, name: str, task: str = "") -> OutputDir:
        """Return the same directory with another lock, and the file system to use under that lock.

        Args:
            name: the lock's file below ``state``.
            task: the holder's task, for error messages in other processes.
        """
        files, lock = self._access(name, task)
        return OutputDir(self.root, files, lock, self.writer, self._access)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock; create the directory if it is missing.

        Raises:
            LockedError: another run holds the lock.
            StorageError: the directory cannot be written to.
        """
        with storage_errors(self.state):
            self.files.make_directory(self.state)
        with self.lock.held():
            yield

    @property
    def next_run_id(self) -> str:
        """Id of the next run of ``writer``.

        Ids sort in the order of runs, even if the clock was set back or records are lost. Two
        writers that begin at the same time may get the same number, but each id contains the
        writer's name.
        """
        folders = (self.runs, self.steps, self.logs, self.in_flight)
        names = [path.name for folder in folders for path in self.files.entries(folder)]
        return run_id(1 + max(map(run_number, names), default=0), self.writer)

    def of_each(self, look: Callable[[S], T], items: Iterable[S]) -> list[T]:
        """Return ``look(item)`` for each part or path, in order; in an object store, the calls run
        in parallel."""
        if self.files.parallel_requests == 1:
            return [look(item) for item in items]
        with ThreadPoolExecutor(self.files.parallel_requests) as pool:
            return list(pool.map(look, items))

    def reopen(self) -> None:
        """Delete the record of the files, then ``_SUCCESS``, under the directory's lock."""
        for paths, folder in ((self.file_records, self.state), ((self.success,), self.root)):
            for path in paths:
                with storage_errors(path, "delete"):
                    self.files.delete(path)
            with storage_errors(folder, "delete"):
                self.files.sync(folder)

    def finished(self, part: Part, trust: Trust = "marks") -> PartRecord | None:
        """Return the record of ``part`` after checking its files; None if it has no record.

        Raises:
            DataError: the record is damaged, or a file does not match it.
            StorageError: a file cannot be read.
        """
        record = self.read_record(part)
        if record is None:
            return None
        file, requests = self.part_file(part), self.request_stats(part)
        stat, requests_stat = self.check_size(file, record.size), self._existing(requests)
        has_other_time = trust == "times" and stat.mtime_ns != record.mtime_ns
        if has_other_time or not _is_trusted(trust, stat.etag, record.etag):
            self.check_hash(file, record.sha256)
        if not _is_trusted(trust, requests_stat.etag, record.requests_etag):
            self.check_hash(requests, record.requests_sha256)
        return record

    def read_record(self, part: Part) -> PartRecord | None:
        """Return the record of ``part`` without checking its files; None if it has no record. Raise
        DataError if the record is damaged."""
        path = self.record(part)
        try:
            return parse_record(read_file(self.files, path), part)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise DataError(f"{path} is damaged") from None

    def check_size(self, path: PurePath, size: int) -> FileStat:
        """Return a file's stat; raise DataError if the file is missing or is not ``size`` bytes
        long."""
        stat = self._existing(path)
        if stat.size != size:
            raise DataError(f"{path} has {stat.size} bytes, but {size} bytes were written")
        return stat

    def _existing(self, path: PurePath) -> FileStat:
        stat = self.files.stat(path)
        if stat is None:
            raise DataError(f"{path} is missing")
        return stat

    def check_hash(self, path: PurePath, sha256: str) -> None:
        """Raise DataError if a file is missing, or if its SHA-256 is not ``sha256``."""
        try:
            actual = sha256_of(self.files, path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        if actual != sha256:
            raise DataError(f"{path} has changed since it was written (its hash differs)")

    def read_table(self, path: PurePath, columns: Sequence[str] | None = None) -> pa.Table:
        """Read a Parquet file, or some of its columns, and verify its page checksums.

        Raises:
            OSError, pyarrow.ArrowException: the file is damaged or missing.
                StorageError: the file cannot be read.
        """
        with self.files.open(path) as file:
            reader = pq.ParquetFile(file, page_checksum_verification=True)
            return reader.read(columns, use_threads=False)

    def read_part(self, part: Part) -> pa.Table:
        """Return the rows of a finished part.

        Raises:
            DataError: the part's file is damaged or missing.
                StorageError: the file cannot be read.
        """
        path = self.part_file(part)
        try:
            return self.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {first_line(error)}") from None

    def read_keys(self, part: Part, record: PartRecord) -> pa.Table | None:
        """Return row ids and keys of a finished part; None if their file is damaged or missing.

        Without the keys, no other job can reuse the part's rows.

        Raises:
            StorageError: the file cannot be read, but may be intact.
        """
        try:
            data = read_file(self.files, self.row_keys(part))
        except OSError:
            return None
        if hashlib.sha256(data).hexdigest() != record.keys_sha256:
            return None
        return pq.read_table(pa.BufferReader(data), use_threads=False)

    def write(self, final: PurePath, data: bytes) -> None:
        """Write ``data`` to ``final``, completely or not at all."""
        write_file(self.files, final, data, self.staging)

    def write_json(self, final: PurePath, value: Any) -> None:
        """Write ``value`` to ``final`` as JSON, completely or not at all."""
        self.write(final, json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")

    def write_table(self, final: PurePath, table: pa.Table) -> None:
        """Write ``table`` to ``final`` as a Parquet file, completely or not at all."""
        self.write(final, parquet_bytes([table]))

    def empty(self, folder: PurePath) -> None:
        """Delete everything in a folder."""
        for path in self.files.entries(folder):
            with storage_errors(path, "delete"):
                self.files.delete(path)

    def part_file(self, part: Part) -> PurePath:
        return self.data / f"{part.name}.parquet"

    def request_stats(self, part: Part) -> PurePath:
        """Return the path of the statistics of a finished part's rows."""
        return self.requests / f"{part.name}.parquet"

    def row_keys(self, part: Part) -> PurePath:
        """Return the path of the keys of a finished part's rows."""
        return self.keys / f"{part.name}.parquet"

    def record(self, part: Part) -> PurePath:
        return self.parts / f"{part.name}.json"


def _is_trusted(trust: Trust, mark: str | None, recorded: str | None) -> bool:
    """Return True if a file's ETag, or its absence, shows that the file need not be read."""
    if trust == "nothing" or mark != recorded:
        return False
    return mark is not None or trust == "times"
