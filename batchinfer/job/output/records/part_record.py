"""The record of a finished part: the sizes, hashes and counts that its files must have."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import ClassVar

from pydantic import NonNegativeInt, TypeAdapter

from batchinfer.job.row_ranges import Part
from batchinfer.job.storage.filesystem import STRICT


@dataclass(frozen=True)
class PartRecord:
    __pydantic_config__: ClassVar = STRICT

    rows: NonNegativeInt
    error_codes: dict[str, NonNegativeInt]
    """Number of failed rows, keyed by error code."""
    control_text_row_ids: list[int]
    """Ids of rows whose input contains the text of a control token, such as ``<|im_end|>``."""
    size: NonNegativeInt
    mtime_ns: NonNegativeInt
    sha256: str
    requests_sha256: str
    """SHA-256 of the file with the rows' statistics."""
    etag: str | None = None
    """The part's ETag in the object store; None in a file system."""
    requests_etag: str | None = None
    """The ETag of the file with the rows' statistics; None in a file system."""
    keys_sha256: str | None = None
    """SHA-256 of the file with the rows' keys; None in records of older versions."""
    num_reused: NonNegativeInt = 0

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


_STORED = TypeAdapter(PartRecord)


def parse_record(data: bytes, part: Part) -> PartRecord:
    """Return the stored record of ``part``. Raise ValueError if the record is damaged, or belongs
    to another part."""
    record = _STORED.validate_json(data)
    failed, marked = sum(record.error_codes.values()), record.control_text_row_ids
    if not (
        record.rows == part.num_rows >= failed
        and len(set(marked)) == len(marked)
        and all(row_id in part.rows for row_id in marked)
    ):
        raise ValueError("the record belongs to another part")
    return record
