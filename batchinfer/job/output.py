"""The output directory: its paths, who may write to it, which parts are finished.

``_batchinfer/manifest.json`` says what the directory is for. A part is finished when its record
``_batchinfer/parts/part-N.json`` is there and its file is as the record says; the record is
written after the file. The statistics of a part's rows, ``_batchinfer/requests/part-N.parquet``,
are written before both, so that finished rows always have theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from batchinfer.errors import DataError, LockedError
from batchinfer.job.files import publish, sha256_of, storage_errors, write_file
from batchinfer.job.manifest import Part


@dataclass(frozen=True)
class PartRecord:
    """What a finished part holds."""

    rows: int
    error_codes: dict[str, int]
    """Rows that failed, by code."""
    control_text_rows: int
    """Rows whose own text holds what looks like one of the model's control tokens."""
    size: int
    mtime_ns: int
    sha256: str


class OutputDir:
    """Paths of an output directory, and writing to them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = root / "data"
        self.stats = root / "stats"
        self.state = root / "_batchinfer"
        self.staging = self.state / "staging"
        self.steps = self.state / "steps"
        self.requests = self.state / "requests"
        self.runs = self.state / "runs"
        self.logs = self.state / "logs"
        self.parts = self.state / "parts"
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
            self.state.mkdir(parents=True, exist_ok=True)
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
        path = self._record(part)
        if not path.exists():
            return None
        record = _read_record(path, len(part.rows))
        self._check(part, record)
        return record

    def _check(self, part: Part, record: PartRecord) -> None:
        file, requests = self.part_file(part), self.request_stats(part)
        for path in (file, requests):
            if not path.exists():
                raise DataError(f"{path} is missing")
        try:
            stat = file.stat()
            if stat.st_size != record.size:
                raise DataError(f"{file} has {stat.st_size} bytes; {record.size} were written")
            if stat.st_mtime_ns != record.mtime_ns and sha256_of(file) != record.sha256:
                raise DataError(f"{file} holds other bytes than were written (its hash differs)")
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}") from None

    def commit(
        self,
        part: Part,
        table: pa.Table,
        requests: pa.Table,
        error_codes: dict[str, int],
        control_text_rows: int,
    ) -> None:
        """Write a finished part: its rows' statistics, its file, its record.

        Raises:
            StorageError: the file system refuses; the part is then not finished.
        """
        self.write_table(self.request_stats(part), requests)
        self.write_table(self.part_file(part), table)
        with storage_errors(self.part_file(part)):
            stat, digest = self.part_file(part).stat(), sha256_of(self.part_file(part))
        record = PartRecord(
            table.num_rows, error_codes, control_text_rows, stat.st_size, stat.st_mtime_ns, digest
        )
        self.write(self._record(part), json.dumps(asdict(record)).encode())

    def write_table(self, final: Path, table: pa.Table) -> None:
        """Write ``table`` as a Parquet file, zstd, with page checksums."""
        staged = self.staging / final.name
        with storage_errors(final):
            pq.write_table(table, staged, compression="zstd", write_page_checksum=True)
        publish(staged, final)

    def write(self, final: Path, data: bytes) -> None:
        """Write ``data`` to ``final``, all of it or nothing."""
        write_file(final, data, self.staging)

    def write_json(self, final: Path, value: Any) -> None:
        """Write ``value`` to ``final`` as JSON, all of it or nothing."""
        self.write(final, json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")

    def request_stats(self, part: Part) -> Path:
        """File of the statistics of a finished part's rows."""
        return self.requests / f"{part.name}.parquet"

    def part_file(self, part: Part) -> Path:
        """Where a part goes."""
        return self.data / f"{part.name}.parquet"

    def _record(self, part: Part) -> Path:
        return self.parts / f"{part.name}.json"


def _read_record(path: Path, num_rows: int) -> PartRecord:
    """A record, checked: what is damaged must not pass for finished.

    Raises:
        DataError: it is damaged.
    """
    try:
        record = PartRecord(**json.loads(path.read_bytes()))
        counts = [record.rows, record.control_text_rows, *record.error_codes.values()]
        whole = record.rows == num_rows and all(isinstance(count, int) for count in counts)
    except (OSError, ValueError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise DataError(f"{path} is damaged")
    return record
