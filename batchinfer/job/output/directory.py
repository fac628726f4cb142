"""The output directory: its paths, who may write to it, which parts are finished.

``_batchinfer/manifest.json`` says what the directory is for. A part is finished when its record
``_batchinfer/parts/part-N.json`` is there and its file is as the record says
(``batchinfer.job.output.commit`` writes them). Finished rows of other parts are in
``_batchinfer/segments`` (``batchinfer.job.output.segments``). Nothing else says what is done.
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
from batchinfer.job.output.part_record import PartRecord, parse_record
from batchinfer.job.row_ids import Part
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

T = TypeVar("T")
Access = Callable[[str, str], tuple[Files, Lock]]
Trust = Literal["nothing", "marks", "times"]
"""What saves reading a finished part: nothing; a store's mark of its content; or, where there are
no marks, the time it was written as well."""


class OutputDir:
    """The paths of an output directory, and access to them.

    Args:
        root: the directory.
        files: its file system; None: this machine's.
        lock: its lock; None: one in this machine's file system.
        writer: who writes beside others, as in the names of its runs and segments; "": who writes
            alone.
        access: makes a lock in ``_batchinfer`` by its name and its holder's task, and the files
            that are written while it is held; None: ``files``, and locks in this machine's file
            system.
        staging: the folder that it stages files in, below those of others; "": named as it is.
        place: where readers will find it; None: here.
    """

    def __init__(
        self,
        root: PurePath,
        files: Files | None = None,
        lock: Lock | None = None,
        writer: str = "",
        access: Access | None = None,
        staging: str = "",
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
        self.staging = self.state / "staging" / (staging or writer)
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
        """How far runs are, which they write every few seconds."""
        self.locks = self.state / "locks"
        self.next = self.state / "next"
        """Generations that are to take the place of the one here."""
        self.swap = self.state / "swap.json"
        """There while one takes it: what is here is then partly of either."""
        self.claims = self.state / "claims"
        """Which writer makes which parts, where several write (``batchinfer.job.claims``)."""
        self.shards = self.state / "shards.json"
        self.suspects = self.state / "suspects.json"
        self.bad_ids = self.state / "bad_ids.parquet"
        self.manifest = self.state / "manifest.json"
        self.manifest_copy = self.state / "manifest-copy.json"
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
        """Folders of one generation, which hold files alone; that of the records last."""
        results = (self.data, self.stats, self.openai)
        notes = (
            self.segments,
            self.requests,
            self.keys,
            self.steps,
            self.runs,
            self.logs,
            self.in_flight,
        )
        return (*results, *notes, self.parts)

    @property
    def single_files(self) -> tuple[PurePath, ...]:
        """Files of one generation beside those folders, the plan last, but for ``success``."""
        results = (self.openai_record, self.suspects, self.summary, self.report)
        return (*results, self.manifest_copy, self.manifest)

    def for_writer(
        self,
        writer: str,
        files: Files | None = None,
        lock: Lock | None = None,
        staging: str = "",
    ) -> OutputDir:
        """The same directory as one of several writers has it: what it stages, and what it knows of
        crashes, is its own.

        Args:
            writer: a letter and then letters and digits.
            files: what it writes with; None: what this one does.
            lock: what it holds while it writes; None: what this one holds.
            staging: the folder it stages files in; "": named as the writer.
        """
        return OutputDir(
            self.root, files or self.files, lock or self.lock, writer, self._access, staging
        )

    def generation(self, name: str) -> OutputDir:
        """The directory of a generation that is to take the place of this one's; whoever holds the
        lock here may write there."""
        return OutputDir(
            self.next / name, self.files, self.lock, access=self._access, place=self.root
        )

    def under_lock(self, name: str, task: str = "") -> OutputDir:
        """The same directory with another lock, and written to while that is held.

        Args:
            name: the lock's file below ``state``.
            task: as others see it that meet the lock.
        """
        return self.for_writer(self.writer, *self._access(name, task))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory for this run; it is created where it is missing.

        Raises:
            LockedError: another run holds it.
            StorageError: it cannot be written to.
        """
        with storage_errors(self.state):
            self.files.make_directory(self.state)
        with self.lock.held():
            yield

    @property
    def next_run_id(self) -> str:
        """The id of the next run of ``writer``.

        Ids sort in the order of runs, whatever the clock did or is lost. Those of writers that
        begin at once may have one number, and differ in the writer.
        """
        folders = (self.runs, self.steps, self.logs, self.in_flight)
        names = [path.name for folder in folders for path in self.files.entries(folder)]
        return run_id(1 + max(map(run_number, names), default=0), self.writer)

    def of_each(self, look: Callable[[Part], T], parts: Iterable[Part]) -> list[T]:
        """Results of ``look`` for each part, in order; several at a time where that is faster."""
        if self.files.parallel_requests == 1:
            return [look(part) for part in parts]
        with ThreadPoolExecutor(self.files.parallel_requests) as pool:
            return list(pool.map(look, parts))

    def finished(self, part: Part, trust: Trust = "marks") -> PartRecord | None:
        """The record of ``part``, which is as it says; None if it has none.

        Raises:
            DataError: the record is damaged, or the part is no longer as it says.
            StorageError: one of them cannot be read.
        """
        record = self.read_record(part)
        if record is None:
            return None
        file, requests = self.part_file(part), self.request_stats(part)
        found, found_requests = self.check_size(file, record.size), self._existing(requests)
        has_other_time = trust == "times" and found.mtime_ns != record.mtime_ns
        if has_other_time or not _is_trusted(trust, found.etag, record.etag):
            self.check_hash(file, record.sha256)
        if not _is_trusted(trust, found_requests.etag, record.requests_etag):
            self.check_hash(requests, record.requests_sha256)
        return record

    def read_record(self, part: Part) -> PartRecord | None:
        """The record of ``part``, whatever has become of the part; None if it has none.

        Raises:
            DataError: it is damaged.
        """
        path = self.record(part)
        try:
            return parse_record(read_file(self.files, path), part)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise DataError(f"{path} is damaged") from None

    def check_size(self, path: PurePath, size: int) -> FileStat:
        """Size, time and mark of a file that has as many bytes as were written.

        Raises:
            DataError: it has not, or is missing.
        """
        found = self._existing(path)
        if found.size != size:
            raise DataError(f"{path} has {found.size} bytes; {size} were written")
        return found

    def _existing(self, path: PurePath) -> FileStat:
        stat = self.files.stat(path)
        if stat is None:
            raise DataError(f"{path} is missing")
        return stat

    def check_hash(self, path: PurePath, sha256: str) -> None:
        """Check that a file's bytes are those that were written.

        Raises:
            DataError: they are not, or are not there.
        """
        try:
            found = sha256_of(self.files, path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        if found != sha256:
            raise DataError(f"{path} holds other bytes than were written (its hash differs)")

    def write_table(self, final: PurePath, table: pa.Table) -> None:
        """Write ``table`` as a Parquet file, all of it or nothing."""
        self.write(final, parquet_bytes([table]))

    def read_table(self, path: PurePath, columns: Sequence[str] | None = None) -> pa.Table:
        """Read a Parquet file, or columns of it, its page checksums verified.

        Raises:
            OSError, pyarrow.ArrowException: it is damaged or missing.
            StorageError: it cannot be read.
        """
        with self.files.open(path) as file:
            reader = pq.ParquetFile(file, page_checksum_verification=True)
            return reader.read(columns, use_threads=False)

    def read_part(self, part: Part) -> pa.Table:
        """The rows of a finished part.

        Raises:
            DataError: its file is damaged or missing.
            StorageError: it cannot be read.
        """
        path = self.part_file(part)
        try:
            return self.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {first_line(error)}") from None

    def write(self, final: PurePath, data: bytes) -> None:
        """Write ``data`` to ``final``, all of it or nothing."""
        write_file(self.files, final, data, self.staging)

    def write_json(self, final: PurePath, value: Any) -> None:
        """Write ``value`` to ``final`` as JSON, all of it or nothing."""
        self.write(final, json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")

    def empty(self, folder: PurePath) -> None:
        """Delete all that is in one of this directory's folders.

        Raises:
            StorageError: something there cannot be deleted.
        """
        for path in self.files.entries(folder):
            with storage_errors(path, "delete"):
                self.files.delete(path)

    def request_stats(self, part: Part) -> PurePath:
        """File of the statistics of a finished part's rows."""
        return self.requests / f"{part.name}.parquet"

    def row_keys(self, part: Part) -> PurePath:
        """File of the keys of a finished part's rows."""
        return self.keys / f"{part.name}.parquet"

    def read_keys(self, part: Part, record: PartRecord) -> pa.Table | None:
        """Row ids and keys of a finished part; None where its file is damaged or missing, which
        only means that its rows are nobody's to reuse.

        Raises:
            StorageError: it cannot be read, which does not say that it is damaged.
        """
        try:
            data = read_file(self.files, self.row_keys(part))
        except OSError:
            return None
        if hashlib.sha256(data).hexdigest() != record.keys_sha256:
            return None
        return pq.read_table(pa.BufferReader(data), use_threads=False)

    def part_file(self, part: Part) -> PurePath:
        """File of a part's rows."""
        return self.data / f"{part.name}.parquet"

    def record(self, part: Part) -> PurePath:
        """File of a finished part's record."""
        return self.parts / f"{part.name}.json"


def _is_trusted(trust: Trust, mark: str | None, recorded: str | None) -> bool:
    """Whether content need not be read, by a store's mark of it."""
    if trust == "nothing" or mark != recorded:
        return False
    return mark is not None or trust == "times"
