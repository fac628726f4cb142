"""The start of an output by several writers that must find nothing, or delete what they find.

With ``output.if_exists: overwrite`` the first writer deletes, and the others must not delete what
their siblings have made since; with ``error`` the first must find nothing, and the others will find
its rows. So the first stores which team has begun, and when its plan was made, which is in the
manifest as well. From there on all of them resume, also those that are run again, until the job is
finished.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import ClassVar

from pydantic import TypeAdapter

from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.manifest_file import stored_manifest
from batchinfer.job.output.resume import holds_plan
from batchinfer.job.storage.filesystem import STRICT, read_file


@dataclass(frozen=True)
class FreshStart:
    """What ``_batchinfer/shards.json`` says."""

    __pydantic_config__: ClassVar = STRICT

    team: str
    """``Writer.team`` of those who begin."""
    planned_at: str
    """``Manifest.planned_at`` of their plan."""
    is_clear: bool
    """Whether what was there has gone; until then they load their models."""

    def store(self, out: OutputDir) -> None:
        """Write it down; call it under the lock."""
        out.write(out.shards, json.dumps(asdict(self)).encode())

    def is_of(self, out: OutputDir, manifest: Manifest) -> bool:
        """Whether what is in ``out`` was begun by it, for the job that ``manifest`` plans."""
        if not (self.is_clear and holds_plan(out, manifest)):
            return False
        return stored_manifest(out).planned_at == self.planned_at


_STORED = TypeAdapter(FreshStart)


def stored_start(out: OutputDir, team: str) -> FreshStart | None:
    """The start that a team has written down last; None if there is none."""
    try:
        found = _STORED.validate_json(read_file(out.files, out.shards))
    except (OSError, ValueError):
        return None
    return found if found.team == team else None
