"""Parts on their way from a worker to the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from batchinfer.errors import StorageError
from batchinfer.job.fleet.files.publisher import PartPublisher, sweep
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.commit import Draft, hand_over, publish, stage
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.resume import clear_staging
from batchinfer.job.output.stats_tables import REQUESTS_SCHEMA
from batchinfer.job.row_ids import Part
from tests.job.datasets import flip_bit
from tests.job.fakes import begin

PLAN = Manifest("f", {}, (), (), 12, 4, "2026-11-20T10:00:00")
PARTS = PLAN.parts()


@pytest.fixture
def out(tmp_path: Path) -> OutputDir:
    out = OutputDir(tmp_path / "out")
    begin(out, PLAN)
    return out


def drafted(out: OutputDir, part: Part, lease: int = 1, run_id: str = "run-00001-w01") -> Draft:
    """A part as a worker hands it over."""
    own = out.for_writer("w01", staging=run_id)
    clear_staging(own)
    rows = pa.table({"row_id": list(part.rows)})
    return hand_over(own, stage(own, part, rows, REQUESTS_SCHEMA.empty_table(), []), lease)


def published(out: OutputDir, drafts: dict[Part, Draft]) -> list[Part]:
    publisher = PartPublisher(out)
    for part, draft in drafts.items():
        publisher.submit(part, draft)
    publisher.close()
    return list(publisher.published())


def test_parts_that_are_handed_over_are_finished_and_leave_nothing(out: OutputDir) -> None:
    drafts = {part: drafted(out, part, run_id=f"run-00001-w0{part.index}") for part in PARTS}
    assert published(out, drafts) == PARTS
    assert all(out.finished(part, "nothing") for part in PARTS)
    sweep(out)
    assert not list(Path(out.staging).iterdir())


def test_a_worker_of_the_run_before_writes_to_none_of_this_ones_files(out: OutputDir) -> None:
    draft = drafted(out, PARTS[0], run_id="run-00002-w01")
    late = drafted(out, PARTS[0], run_id="run-00001-w01")
    (Path(out.state) / late.staged).write_bytes(b"of a worker that thawed")
    assert published(out, {PARTS[0]: draft}) == [PARTS[0]]
    assert out.finished(PARTS[0], "nothing")


def test_no_later_lease_writes_to_what_is_handed_over(out: OutputDir) -> None:
    own = out.for_writer("w01", staging="run-00001-w01")
    clear_staging(own)
    rows, requests = pa.table({"row_id": list(PARTS[0].rows)}), REQUESTS_SCHEMA.empty_table()
    first, second = (
        hand_over(own, stage(own, PARTS[0], rows, requests, []), lease) for lease in (1, 2)
    )
    assert first.staged != second.staged
    assert first.sha256_of.keys().isdisjoint(second.sha256_of)
    assert (first.lease, second.lease) == (1, 2)


@pytest.mark.parametrize("harm", [lambda path: flip_bit(path, 40), lambda path: path.unlink()])
@pytest.mark.parametrize("name", ["staged", "staged_requests", "staged_keys"])
def test_what_is_not_as_it_was_staged_is_not_published(
    out: OutputDir, harm: Callable[[Path], None], name: str
) -> None:
    draft = drafted(out, PARTS[0])
    harm(Path(out.state) / getattr(draft, name))
    with pytest.raises(StorageError, match=r"its hash differs|cannot be read"):
        published(out, {PARTS[0]: draft})
    assert out.finished(PARTS[0]) is None


def test_a_part_of_another_size_than_was_staged_gets_no_record(out: OutputDir) -> None:
    draft = drafted(out, PARTS[0])
    with pytest.raises(StorageError, match=r"bytes; .* were staged"):
        publish(out, PARTS[0], replace(draft, size=draft.size + 1))
    assert out.finished(PARTS[0]) is None
