"""The record of a finished part: sizes, hashes and counts that what is found is compared with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from batchinfer.job.row_ids import Part
from batchinfer.job.storage.filesystem import parse_json


@dataclass(frozen=True)
class PartRecord:
    """Sizes, hashes and counts of a finished part."""

    rows: int
    error_codes: dict[str, int]
    """Rows that failed, by code."""
    control_text_row_ids: list[int]
    """Rows whose own text holds what looks like one of the model's control tokens."""
    size: int
    mtime_ns: int
    sha256: str
    requests_sha256: str
    """Hash of the file of the rows' statistics."""
    etag: str | None = None
    """An object store's mark of the content; None in a file system."""
    requests_etag: str | None = None
    """Mark of the file of the rows' statistics."""

    def to_json(self) -> bytes:
        """The record as it is stored."""
        return json.dumps(asdict(self)).encode()


def parse_record(data: bytes, part: Part) -> PartRecord:
    """The stored record of ``part``, each value checked.

    Raises:
        ValueError: it is damaged.
    """
    try:
        record = PartRecord(**parse_json(data))
        failed, marked = record.error_codes.values(), record.control_text_row_ids
        whole = (
            _are_counts([record.rows, record.size, record.mtime_ns, *failed, *marked])
            and all(isinstance(etag, str | None) for etag in (record.etag, record.requests_etag))
            and record.rows == part.num_rows >= sum(failed)
            and len(set(marked)) == len(marked)
            and all(row_id in part.rows for row_id in marked)
        )
    except (TypeError, AttributeError):
        whole = False
    if not whole:
        raise ValueError("not this part's record")
    return record


def _are_counts(values: Iterable[object]) -> bool:
    """Whether all are whole numbers of 0 or more; a bool is none."""
    return all(type(value) is int and value >= 0 for value in values)
