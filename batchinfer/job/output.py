"""The output directory: what is in it, who may write to it, which parts are finished.

``_batchinfer/manifest.json`` says what the directory is for. A part is finished when its record
``_batchinfer/parts/part-N.json`` is there and its file is as the record says; the record is
written after the file. The statistics of a part's rows, ``_batchinfer/requests/part-N.parquet``,
are written before both, so that finished rows always have theirs.
"""

from __future__ import annotations

import json
import os
import shutil
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
from batchinfer.job.manifest import Manifest, Part, read_manifest

_OURS = ("data", "stats", "openai", "_batchinfer", "summary.json", "report.html", "_SUCCESS")


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

    def begin(self, manifest: Manifest, if_exists: str) -> list[Part]:
        """Make the directory ready for the job of ``manifest``; call it under the lock.

        Args:
            manifest: what this run plans.
            if_exists: ``resume``, ``error`` or ``overwrite``.

        Returns:
            The parts that are still to be made, in order.

        Raises:
            LockedError: the directory holds finished parts of another job, or files of unknown
                origin.
            DataError: the input has changed since the first part was finished.
            StorageError: the directory cannot be written to.
        """
        self._refuse_foreign_data()
        if self.manifest.exists() and if_exists == "error":
            raise LockedError(f"{self.root} holds output already, and output.if_exists is error")
        with storage_errors(self.root):
            if if_exists == "overwrite" or self._holds_another_plan(manifest):
                self._clear()
            shutil.rmtree(self.staging, ignore_errors=True)
            self._make_directories()
        if self._has_finished_parts():
            read_manifest(self.manifest).check_same_job(manifest, str(self.root))
        else:
            self.write(self.manifest, manifest.to_json())
        todo = [part for part in manifest.parts() if self.finished(part) is None]
        if todo:
            with storage_errors(self.success):
                self.success.unlink(missing_ok=True)
        return todo

    def finished(self, part: Part) -> PartRecord | None:
        """The record of ``part`` if the part is finished and its file is as it was written."""
        try:
            record = PartRecord(**json.loads(self._record(part).read_bytes()))
            stat = self._file(part).stat()
            requests = self.request_stats(part).exists()
        except (OSError, ValueError, TypeError):
            return None
        if not requests or stat.st_size != record.size:
            return None
        if stat.st_mtime_ns != record.mtime_ns and sha256_of(self._file(part)) != record.sha256:
            return None
        return record

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
        self.write_table(self._file(part), table)
        with storage_errors(self._file(part)):
            stat, digest = self._file(part).stat(), sha256_of(self._file(part))
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

    def _file(self, part: Part) -> Path:
        return self.data / f"{part.name}.parquet"

    def _record(self, part: Part) -> Path:
        return self.parts / f"{part.name}.json"

    def _make_directories(self) -> None:
        state = (self.staging, self.steps, self.requests, self.runs, self.logs, self.parts)
        for directory in (self.data, self.stats, *state):
            directory.mkdir(parents=True, exist_ok=True)

    def _refuse_foreign_data(self) -> None:
        """Neither mix with nor delete what another program has put here."""
        if not self.manifest.exists() and self.data.is_dir() and os.listdir(self.data):
            raise LockedError(
                f"{self.data} holds files that are no output of batchinfer",
                hint="use --output for another directory, or move them away",
            )

    def _holds_another_plan(self, manifest: Manifest) -> bool:
        """Whether what is here was begun for another plan, and none of its parts was finished."""
        if not self.manifest.exists() or self._has_finished_parts():
            return False
        try:
            begun = read_manifest(self.manifest)
        except DataError:
            return True
        return (begun.fingerprint, begun.inputs) != (manifest.fingerprint, manifest.inputs)

    def _has_finished_parts(self) -> bool:
        return any(self.parts.glob("*"))

    def _clear(self) -> None:
        """Delete this program's output, the manifest last; the lock stays."""
        keep = {self.manifest, self.state / "lock"}
        for path in [self.root / name for name in _OURS if name != self.state.name]:
            _delete(path)
        for path in set(self.state.iterdir()) - keep:
            _delete(path)
        self.manifest.unlink(missing_ok=True)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
