"""Files of tokens in flight, each with what was drawn since the one before, or with all there is.

A run writes ``<run id>-<number>-<hash of its bytes>.parquet`` into ``_batchinfer/tokens``. What is
wrong with such a file costs time to compute and no more: it is left out, and with it what follows
what it held. It says which plan it is of, its name which bytes it has, an increment which request
it is of, by the row's key, and which others it follows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePath

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.engine.output_tracker import OutputIncrement
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.parquet_bytes import parquet_bytes
from batchinfer.job.row_ids import sorted_row_ids, within
from batchinfer.job.run_ids import writer_of
from batchinfer.job.storage.filesystem import read_file, storage_errors
from batchinfer.job.tokens.in_flight import TokenUpdate
from batchinfer.job.tokens.record import SCHEMA, KeptOutput, RequestId, from_table, to_table

_NAME = re.compile(r"(?P<run>run-\d+(?:-[a-z]\w*)?)-\d{6,}-(?P<digest>[0-9a-f]+)\.parquet")
_PLAN = b"batchinfer.plan"


class TokenFiles:
    """The files of tokens of an output directory, as one run reads and writes them.

    Args:
        adapters: number of each of the model's adapters, by which requests name them: tokens that
            were drawn under other numbers are not taken.
        run_id: of the run.
    """

    def __init__(
        self, out: OutputDir, plan: Manifest, adapters: Mapping[str, int], run_id: str
    ) -> None:
        self._out = out
        self._plan = f"{plan.fingerprint} {plan.planned_at} {sorted(adapters.items())}".encode()
        self._run_id = run_id
        self._num_written = 0
        self._sizes: dict[PurePath, int] = {}
        """Bytes of the files that may be of use, and that this writer may delete."""
        self.bytes_written = 0

    @property
    def size(self) -> int:
        """Bytes in the files that may be of use."""
        return sum(self._sizes.values())

    def recover(
        self, missing: Sequence[range], beside: Collection[str] | None = None
    ) -> dict[RequestId, KeptOutput]:
        """Find the tokens that earlier runs have left; where there are none, their files are
        deleted.

        Args:
            missing: rows that are not finished, in order; of several writers: that this one runs.
            beside: writers whose rows these are not, which others may take later: no file is
                deleted; None: there are none.

        Raises:
            StorageError: a file cannot be read or deleted.
        """
        kept: dict[RequestId, KeptOutput] = {}
        for path in self._out.files.entries(self._out.tokens):
            run, writer = run_of_tokens(path.name), writer_of(run_of_tokens(path.name))
            if run == self._run_id or writer in (beside or ()):
                continue
            size, increments = self._read(path)
            if beside is None and self._out.writer in ("", writer):
                self._sizes[path] = size
            wanted = set(within(sorted_row_ids(one.row_id for one in increments), missing).tolist())
            for increment in increments:
                if increment.row_id in wanted:
                    _add(kept, run, increment)
        if not kept and beside is None:
            self._delete(list(self._sizes))
        return kept

    def write(self, update: TokenUpdate) -> None:
        """Put tokens on disk.

        Where the process dies before the files are deleted that they replace, all are read: the
        chains of the new one make the others' void.

        Raises:
            StorageError: they cannot be written, or replaced files not deleted.
        """
        replaced = list(self._sizes) if update.replaces_all else []
        if update.increments:
            self._put(update.increments)
        self._delete(replaced)

    def _put(self, increments: Sequence[OutputIncrement]) -> None:
        table = to_table(increments).replace_schema_metadata({_PLAN: self._plan})
        data = parquet_bytes([table])
        name = f"{self._run_id}-{self._num_written:06d}-{_digest(data)}.parquet"
        self._num_written += 1
        self._out.write(self._out.tokens / name, data)
        self._sizes[self._out.tokens / name] = len(data)
        self.bytes_written += len(data)

    def _delete(self, paths: Iterable[PurePath]) -> None:
        for path in paths:
            with storage_errors(path, "delete"):
                self._out.files.delete(path)
            del self._sizes[path]

    def _read(self, path: PurePath) -> tuple[int, list[OutputIncrement]]:
        """Bytes of a file, and its increments; none of one that is damaged or of another plan."""
        named = _NAME.fullmatch(path.name)
        try:
            data = read_file(self._out.files, path)
            if named is None or _digest(data) != named["digest"]:
                return 0, []
            with pq.ParquetFile(pa.BufferReader(data)) as reader:
                metadata = reader.metadata.metadata or {}
                if metadata.get(_PLAN) != self._plan or not reader.schema_arrow.equals(SCHEMA):
                    return 0, []
                return len(data), list(from_table(reader.read(use_threads=False)))
        except (OSError, pa.ArrowException):
            return 0, []


def _add(kept: dict[RequestId, KeptOutput], run: str, increment: OutputIncrement) -> None:
    request, chain = (increment.row_id, increment.number), (run, increment.chain)
    known = kept.get(request)
    if known is None or known.chain != chain:
        known = kept[request] = KeptOutput(increment.key, chain, increment.stats)
    known.add(increment)


def run_of_tokens(name: str) -> str:
    """Id of the run that wrote a file of tokens; "" for a file of another name."""
    named = _NAME.fullmatch(name)
    return named["run"] if named else ""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
