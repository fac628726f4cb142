"""What workers put into a store, by way of moto's server, when nobody waits for it any more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from batchinfer.errors import LockedError, StorageError
from batchinfer.job.fleet.files.access import lent, worker_output
from batchinfer.job.fleet.files.driver_log import DriverLog
from batchinfer.job.fleet.files.publisher import PartPublisher, sweep
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.commit import Draft, hand_over, stage
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.open import output_at
from batchinfer.job.output.stats_tables import REQUESTS_SCHEMA
from batchinfer.job.row_ids import Part
from batchinfer.job.storage import connection, object_lock, permit
from tests.job.fakes import begin
from tests.job.stores import LAKE, objects, point_to, s3_server

PLAN = Manifest("f", {}, (), (), 12, 4, "2026-11-20T10:00:00")
PART = PLAN.parts()[0]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def url(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    point_to(server, monkeypatch)
    yield f"{LAKE}/late/{tmp_path.name}"
    connection.connect.cache_clear()


@contextmanager
def driver(url: str) -> Iterator[tuple[OutputDir, bytes]]:
    """The output as a driver holds it, and what it has given its workers."""
    out = output_at(url)
    begin(out, PLAN)
    with out.locked(), lent(out) as nonce:
        yield out, nonce


def of_worker(url: str, nonce: bytes, worker: str) -> OutputDir:
    return worker_output(url, nonce, worker, f"run-00001-{worker}")[0]


def drafted(own: OutputDir, lease: int, text: str = "a", part: Part = PART) -> Draft:
    """A part as a worker hands it over."""
    rows = pa.table({"row_id": list(part.rows), "text": [text] * part.num_rows})
    return hand_over(own, stage(own, part, rows, REQUESTS_SCHEMA.empty_table(), []), lease)


def publish(out: OutputDir, draft: Draft) -> None:
    publisher = PartPublisher(out)
    publisher.submit(PART, draft)
    publisher.close()
    assert list(publisher.published()) == [PART]


def test_a_late_upload_takes_the_place_of_nothing_and_goes(url: str) -> None:
    with driver(url) as (out, nonce):
        fenced, other = (of_worker(url, nonce, worker) for worker in ("w01", "w02"))
        publish(out, drafted(other, lease=2))
        before = objects(url.removeprefix(f"{LAKE}/"))
        late = drafted(fenced, lease=1, text="b")
        found = objects(url.removeprefix(f"{LAKE}/"))
        assert before.items() <= found.items()
        staged = {f"_batchinfer/{name}" for name in late.sha256_of}
        assert staged == found.keys() - before.keys()
        assert out.finished(PART, "nothing")
        sweep(out)
        assert objects(url.removeprefix(f"{LAKE}/")) == before


def test_what_is_published_is_no_longer_staged(url: str) -> None:
    with driver(url) as (out, nonce):
        publish(out, drafted(of_worker(url, nonce, "w01"), lease=1))
        assert not list(out.files.entries(out.staging))


def test_a_part_that_never_came_is_not_published(url: str) -> None:
    with driver(url) as (out, nonce):
        draft = drafted(of_worker(url, nonce, "w01"), lease=1)
        out.files.delete(out.state / draft.staged)
        with pytest.raises(StorageError, match="cannot be read"):
            publish(out, draft)
        assert out.finished(PART) is None


def test_a_worker_whose_driver_has_ended_writes_no_more(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permit, "TRUSTED_S", 0.0)
    with driver(url) as (_, nonce):
        own = of_worker(url, nonce, "w01")
        own.write(own.runs / "run-00001-w01.json", b"{}")
    with pytest.raises(LockedError, match="let this process write"):
        own.write(own.runs / "run-00001-w01.json", b"{}")


def test_a_worker_whose_driver_was_passed_writes_no_more(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permit, "TRUSTED_S", 0.0)
    with driver(url) as (_, nonce):
        own = of_worker(url, nonce, "w01")
        monkeypatch.setattr(object_lock, "LAPSE_S", -1e9)  # its driver was not heard of for long
        with driver(url), pytest.raises(LockedError, match="another has taken over"):
            own.write(own.runs / "run-00001-w01.json", b"{}")


def test_workers_of_a_driver_that_died_write_no_more_once_another_run_begins(url: str) -> None:
    out = output_at(url)
    begin(out, PLAN)
    with out.locked():
        out.write(out.permit, b"of who dies with it")
    own = of_worker(url, b"of who dies with it", "w01")
    begin(output_at(url), PLAN)  # one that needs no workers
    with pytest.raises(LockedError, match="let this process write"):
        own.write(own.runs / "run-00001-w01.json", b"{}")


def test_what_is_deleted_meanwhile_does_not_come_again_from_who_was_fenced(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driver(url) as (out, nonce):
        own = of_worker(url, nonce, "w01")
        log = own.files.append_to(own.in_flight / "run-00001-w01", at_once=True)
        log.write(b"12345678")
        out.files.delete(out.in_flight / "run-00001-w01")
    log.write(b"12345678")  # the store is asked, as the object is not the one it has written
    log.close()
    assert not list(out.files.entries(out.in_flight))


def test_a_store_where_another_output_is_is_refused(url: str) -> None:
    with driver(url), pytest.raises(StorageError, match=r"another output .* on this node"):
        of_worker(url, b"of another driver", "w01")


def test_a_drivers_log_takes_its_number_and_keeps_its_lines(url: str) -> None:
    with driver(url) as (out, _):
        log = DriverLog(out, "run-00007-driver")
        log("one")
        log("two\nwith a hint")
        log.begin_again_if_gone()
        log("three")
        log.close()
        (lines,) = objects(f"{url.removeprefix(f'{LAKE}/')}/_batchinfer/logs").values()
        assert [line.split()[1] for line in lines.splitlines()] == [b"one", b"two", b"three"]
        assert out.next_run_id == "run-00008"
        out.files.delete(out.logs)
        log = DriverLog(out, "run-00007-driver")
        log("one")
        out.files.delete(out.logs)
        log.begin_again_if_gone()
        log("two")
        log.close()
        (lines,) = objects(f"{url.removeprefix(f'{LAKE}/')}/_batchinfer/logs").values()
        assert [line.split()[1] for line in lines.splitlines()] == [b"two"]
