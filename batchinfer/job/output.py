"""The output directory: its paths, who may write to it, which parts are finished.

``_batchinfer/manifest.json`` says what the directory is for. A part is finished when its record
``_batchinfer/parts/part-N.json`` is there and its file is as the record says
(``batchinfer.job.commit`` writes them). Finished rows of other parts are in
``_batchinfer/segments`` (``batchinfer.job.segments``). Nothing else says what is done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from batchinfer.errors import DataError, LockedError
from batchinfer.job.files import (
    Files,
    LocalFiles,
    read_file,
    sha256_of,
    storage_errors,
    write_file,
)
from batchinfer.job.manifest import Part


@dataclass(frozen=True)
class PartRecord:
    """What a finished part holds."""

    rows: int
    error_codes: dict[str, int]
    """Rows that failed, by code."""
    control_text_row_ids: list[int]
    """Rows whose own text holds what looks like one of the model's control tokens."""
    size: int
    mtime_ns: int
    sha256: str


class OutputDir:
    """Paths of an output directory, and reading and writing them."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self.root = root
        self.files = files or LocalFiles()
        self.data = root / "data"
        self.stats = root / "stats"
        self.state = root / "_batchinfer"
        self.staging = self.state / "staging"
        self.steps = self.state / "steps"
        self.requests = self.state / "requests"
        self.runs = self.state / "runs"
        self.logs = self.state / "logs"
        self.parts = self.state / "parts"
        self.segments = self.state / "segments"
        self.in_flight = self.state / "in_flight"
        self.suspects = self.state / "suspects.json"
        self.manifest = self.state / "manifest.json"
        self.success = root / "_SUCCESS"
        self.summary = root / "summary.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory for this run; it is created where it is missing.

        Raises:
            LockedError: another run holds it.
            StorageError: it cannot be written to.
        """
        with storage_errors(self.state):
            self.files.make_directory(self.state)
            lock = FileLock(self.state / "lock", timeout=0)
            try:
                lock.acquire()
            except Timeout:
                raise LockedError(
                    f"another run is writing to {self.root}",
                    hint="wait for it, or use --output for another directory",
                ) from None
        try:
            yield
        finally:
            lock.release()

    def finished(self, part: Part) -> PartRecord | None:
        """The record of ``part``; None if it has none.

        Raises:
            DataError: the record is damaged, or the part is no longer as it says.
        """
        path = self.record(part)
        if self.files.stat(path) is None:
            return None
        record = self._read_record(path, len(part.rows))
        self._check(part, record)
        return record

    def _read_record(self, path: Path, num_rows: int) -> PartRecord:
        """A record, checked: what is damaged must not pass for finished."""
        try:
            record = PartRecord(**json.loads(read_file(self.files, path)))
            counts = [record.rows, *record.control_text_row_ids, *record.error_codes.values()]
            whole = record.rows == num_rows and all(isinstance(count, int) for count in counts)
        except (OSError, ValueError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise DataError(f"{path} is damaged")
        return record

    def _check(self, part: Part, record: PartRecord) -> None:
        file, requests = self.part_file(part), self.request_stats(part)
        try:
            stat = self.files.stat(file)
            for path, found in ((file, stat), (requests, self.files.stat(requests))):
                if found is None:
                    raise DataError(f"{path} is missing")
            assert stat is not None
            if stat.size != record.size:
                raise DataError(f"{file} has {stat.size} bytes; {record.size} were written")
            unchanged = stat.mtime_ns == record.mtime_ns
            if not unchanged and sha256_of(self.files, file) != record.sha256:
                raise DataError(f"{file} holds other bytes than were written (its hash differs)")
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}") from None

    def write_table(self, final: Path, table: pa.Table) -> None:
        """Write ``table`` as a Parquet file, all of it or nothing."""
        self.write(final, parquet_bytes([table]))

    def read_table(self, path: Path) -> pa.Table:
        """Read a Parquet file, its page checksums verified.

        Raises:
            OSError, pyarrow.ArrowException: it cannot be read.
        """
        with self.files.open(path) as file:
            reader = pq.ParquetFile(file, page_checksum_verification=True)
            return reader.read(use_threads=False)

    def write(self, final: Path, data: bytes) -> None:
        """Write ``data`` to ``final``, all of it or nothing."""
        write_file(self.files, final, data, self.staging)

    def write_json(self, final: Path, value: Any) -> None:
        """Write ``value`` to ``final`` as JSON, all of it or nothing."""
        self.write(final, json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")

    def request_stats(self, part: Part) -> Path:
        """File of the statistics of a finished part's rows."""
        return self.requests / f"{part.name}.parquet"

    def part_file(self, part: Part) -> Path:
        """Where a part goes."""
        return self.data / f"{part.name}.parquet"

    def record(self, part: Part) -> Path:
        """File of a finished part's record."""
        return self.parts / f"{part.name}.json"


def parquet_bytes(row_groups: Sequence[pa.Table]) -> bytes:
    """A Parquet file of one or more tables, zstd, with page checksums."""
    file = BytesIO()
    with pq.ParquetWriter(
        file, row_groups[0].schema, compression="zstd", write_page_checksum=True
    ) as writer:
        for table in row_groups:
            writer.write_table(table)
    return file.getvalue()
