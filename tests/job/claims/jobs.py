"""A job that several processes share, and checks of its output."""

from __future__ import annotations

import json
from pathlib import Path

from batchinfer.job.output.open import output_at
from batchinfer.job.output.verify import verify
from batchinfer.job.spec.spec import JobSpec

NUM_ROWS = 75
"""Rows of the job, in eight parts."""


def out_of(spec: JobSpec) -> Path:
    return Path(spec.output.path)


def data(spec: JobSpec) -> dict[str, bytes]:
    """Return the bytes of each part, keyed by file name."""
    return {path.name: path.read_bytes() for path in (out_of(spec) / "data").iterdir()}


def check_finished(spec: JobSpec, plain: dict[str, bytes]) -> None:
    """Check that the output is complete, equals ``plain``, and keeps no files of running jobs."""
    assert data(spec) == plain
    assert verify(output_at(spec.output.path)).data() == {
        **{"ok": True, "complete": True, "parts_total": 8, "parts_done": 8},
        **{"rows": NUM_ROWS, "problems": [], "is_updating": False, "lacks_hashes": False},
        "is_half_updated": False,
    }
    state = out_of(spec) / "_batchinfer"
    for folder in ("segments", "claims", "in_flight", "tokens"):
        assert list((state / folder).glob("*")) == [], folder
    summary = json.loads((out_of(spec) / "summary.json").read_bytes())
    assert summary["rows"]["total"] == NUM_ROWS
