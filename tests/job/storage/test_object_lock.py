"""The lock of an output directory in an object store."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from secrets import token_hex
from threading import Barrier

import obstore
import pytest
from obstore.store import from_url

from batchinfer.errors import LockedError, StorageError
from batchinfer.job.storage import connection, object_lock
from batchinfer.job.storage.local_lock import HOLDER
from batchinfer.job.storage.object_filesystem import StoreFiles
from batchinfer.job.storage.object_lock import LAPSE_S, StoreLock
from batchinfer.job.storage.object_store import Objects
from batchinfer.job.storage.urls import StorePath
from tests.job.stores import BUCKET, LAKE, Request, between, point_to, s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(autouse=True)
def state(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StorePath]:
    point_to(server, monkeypatch)
    yield StorePath(f"{LAKE}/{token_hex(4)}/_batchinfer")
    connection.connect.cache_clear()


class Run:
    """A run's lock and files, on clocks that the test sets.

    Args:
        state: the output's state folder.
        later_s: seconds by which the store's clock is ahead of the real time.
    """

    def __init__(self, state: StorePath, later_s: float = 0.0) -> None:
        self.now = 1000.0
        objects = Objects(state)
        self.lock = StoreLock(objects, state, lambda: self.now, lambda: time.time() + later_s)
        self.files = StoreFiles(objects, self.lock.check, self.lock.confirm)

    def write(self, path: StorePath, data: bytes) -> None:
        staged = path.with_name("staged")
        self.files.write(staged, data)
        self.files.rename(staged, path)


def content(state: StorePath) -> dict[str, object]:
    return json.loads(Objects(state).get(state / HOLDER)[0])


def test_store_lock_is_exclusive_until_released(state: StorePath) -> None:
    first, second = Run(state), Run(state)
    for number in (1, 2, 3):
        with first.lock.held():
            assert content(state)["fence"] == number
            with pytest.raises(LockedError, match=r"another run is writing to .*: process \d+ on "):
                second.lock.acquire()
        assert content(state) == {"fence": number, "token": None, "beat": 0, "holder": None}


def test_store_lock_goes_to_one_of_many_concurrent_runs(state: StorePath) -> None:
    runs, combined_output = [Run(state) for _ in range(6)], Barrier(6)

    def begin(run: Run) -> bool:
        combined_output.wait()
        try:
            run.lock.acquire()
        except LockedError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        for number in (1, 2, 3):
            won = list(pool.map(begin, runs))
            assert won.count(True) == 1
            assert content(state)["fence"] == number
            runs[won.index(True)].lock.release()


def test_store_lock_lapses_without_heartbeat(state: StorePath) -> None:
    first = Run(state)
    first.lock.acquire()
    with pytest.raises(LockedError, match="expires 90 s after"):
        Run(state, LAPSE_S - 10).lock.acquire()
    second = Run(state, LAPSE_S + 10)
    second.lock.acquire()
    assert content(state)["fence"] == 2
    second.lock.check()
    with pytest.raises(LockedError, match=r"another run has taken over .*number 1"):
        first.lock.confirm()
    first.lock.release()
    assert content(state)["token"], "the first holder must not release the second's lock"


def test_store_lock_is_kept_by_heartbeats(
    state: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(state)
    run.lock.acquire()
    before = Objects(state).head(state / HOLDER)
    run.now += LAPSE_S
    run.lock.check()
    assert content(state)["beat"] == 1
    assert Objects(state).head(state / HOLDER) != before
    run.lock.check()
    assert content(state)["beat"] == 1, "recent heartbeats are not repeated"


def test_store_lock_sends_heartbeats_while_held(
    state: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_lock, "HEARTBEAT_S", 0.001)
    with Run(state).lock.held():
        until = time.monotonic() + 60
        while content(state)["beat"] < 3 and time.monotonic() < until:  # type: ignore[operator]
            pass
        assert content(state)["beat"] >= 3  # type: ignore[operator]


def test_suspended_run_that_lost_the_lock_writes_nothing(state: StorePath) -> None:
    sleeper = Run(state)
    sleeper.lock.acquire()
    Run(state, LAPSE_S + 10).lock.acquire()
    sleeper.now += LAPSE_S
    path = state.parent / "data" / "part-00000.parquet"
    with pytest.raises(LockedError):
        sleeper.write(path, b"late")
    with pytest.raises(LockedError):
        sleeper.files.delete(state)
    assert Objects(state).head(path) is None


def test_late_write_of_an_old_holder_replaces_nothing(state: StorePath) -> None:
    """The old holder slept between its last check of the lock and the write."""
    sleeper = Run(state)
    sleeper.lock.acquire()
    path, known = (state.parent / "data" / name for name in ("part-1.parquet", "part-2.parquet"))
    sleeper.write(known, b"early")
    passer = Run(state, LAPSE_S + 10)
    passer.lock.acquire()
    for place in (path, known):
        passer.write(place, b"right")
        with pytest.raises(LockedError):
            sleeper.write(place, b"late")
        assert Objects(state).get(place)[0] == b"right"


def test_objects_of_dead_runs_are_overwritten(state: StorePath) -> None:
    run = Run(state)
    run.lock.acquire()
    path = state.parent / "data" / "part-1.parquet"
    Objects(state).put(path, b"left", None)
    run.write(path, b"right")
    run.write(path, b"again")
    assert Objects(state).get(path)[0] == b"again"
    obstore.delete(from_url(LAKE, client_options={"allow_http": True}), path.key)
    run.write(path, b"once more")
    assert Objects(state).get(path)[0] == b"once more"


def test_delete_lists_objects_before_it_checks_the_lock(state: StorePath) -> None:
    """In this order, nothing slow happens between the check and the delete."""
    sleeper = Run(state)
    sleeper.lock.acquire()
    path = state.parent / "_SUCCESS"
    sleeper.write(path, b"")
    passer = Run(state, LAPSE_S + 10)

    def fall_asleep(keys: list[str]) -> list[str]:
        sleeper.now += LAPSE_S
        passer.lock.acquire()
        passer.write(path, b"right")
        return keys

    objects = sleeper.files._objects
    found = objects.keys(path)
    objects.keys = lambda path: fall_asleep(found)  # type: ignore[method-assign]
    with pytest.raises(LockedError):
        sleeper.files.delete(path)
    assert Objects(state).get(path)[0] == b"right"


@pytest.mark.parametrize("num_gone", [1, 3, 1000])
def test_delete_continues_after_a_missing_object(
    state: StorePath, server: str, monkeypatch: pytest.MonkeyPatch, num_gone: int
) -> None:
    deletes: list[str] = []

    def answer(request: Request) -> int | None:
        if request.method != "DELETE" and "?delete" not in request.path:
            return None
        deletes.append(request.path)
        return 404 if len(deletes) <= num_gone else None

    folder = state.parent / "staging"
    with between(server, answer) as address:
        point_to(address, monkeypatch)
        run = Run(state)
        run.lock.acquire()
        for name in "abc":
            run.write(folder / name, b"")
        deletes.clear()
        if num_gone < 1000:
            run.files.delete(folder)
            assert run.files.entries(folder) == []
        else:
            with pytest.raises(StorageError, match="lists objects that it does not hold"):
                run.files.delete(folder)
    point_to(server, monkeypatch)


def test_delete_sends_no_request_for_missing_objects(
    state: StorePath, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deletes: list[str] = []

    def note(request: Request) -> None:
        if request.method == "DELETE" or "?delete" in request.path:
            deletes.append(request.path)

    with between(server, note) as address:
        point_to(address, monkeypatch)
        run = Run(state)
        run.lock.acquire()
        deletes.clear()
        run.files.delete(state.parent / "_SUCCESS")
        assert deletes == []
        run.write(state.parent / "_SUCCESS", b"")
        run.files.delete(state.parent / "_SUCCESS")
        assert len(deletes) == 1
    point_to(server, monkeypatch)


def test_delete_times_out_before_the_lock_lapses() -> None:
    longest = connection.IMPATIENT["retry_timeout"] + connection._LAST_TRY
    assert longest.total_seconds() < LAPSE_S - object_lock._TRUSTED_S


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"fence": "x"}', b'{"fence": 1, "no": 2}'])
def test_damaged_store_lock_is_held_until_it_lapses(state: StorePath, data: bytes) -> None:
    Objects(state).put(state / HOLDER, data, None)
    with pytest.raises(LockedError):
        Run(state).lock.acquire()
    Run(state, LAPSE_S + 10).lock.acquire()


def test_store_lock_of_a_dead_local_process_is_free(
    state: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Run(state)
    first.lock.acquire()
    assert first.lock.holder_lives()
    holder = {**content(state)["holder"], "started": -1.0}
    data = json.dumps({"fence": 7, "token": "x", "beat": 2, "holder": holder}).encode()
    found = Objects(state).head(state / HOLDER)
    assert found
    Objects(state).put(state / HOLDER, data, found.version)
    assert first.lock.holder_lives() is False
    with monkeypatch.context() as patch:
        patch.setattr(object_lock, "_pid_namespace", lambda: "another container's")
        assert first.lock.holder_lives(), "processes of another machine are unknown"
    Run(state).lock.acquire()
    assert content(state)["fence"] == 8


def test_store_lock_survives_a_lost_answer(
    state: StorePath, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sends the write again, and the store refuses it because the object exists."""
    lost: list[str] = []

    def lose(request: Request) -> int | None:
        if request.method != "PUT" or HOLDER not in request.path or request.path in lost:
            return None
        lost.append(request.path)
        return -503  # the store gets the request, but the client gets 503

    with between(server, lose) as address:
        point_to(address, monkeypatch)
        run = Run(state)
        run.lock.acquire()
        assert lost
        lost.clear()
        run.lock.confirm()
        assert lost
    point_to(server, monkeypatch)
    assert content(state)["fence"] == 1


def test_store_lock_release_ignores_an_unreachable_store(
    state: StorePath, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    away: list[bool] = []
    with between(server, lambda _: 503 if away else None) as address:
        point_to(address, monkeypatch)
        run = Run(state)
        with run.lock.held():
            away.append(True)
            with pytest.raises(StorageError):
                run.lock.confirm()


def test_store_path_is_written_as_url() -> None:
    path = StorePath("s3://lake/a//b/")
    assert str(path) == f"{path}" == "s3://lake/a/b"
    assert str(path / "c" / "d.json") == "s3://lake/a/b/c/d.json"
    assert (path.bucket, path.key, path.parent.name) == (f"s3://{BUCKET}", "a/b", "a")
    assert StorePath("gs://x/y") == StorePath("gs://x") / "y"
    assert len({StorePath("s3://x/y"), StorePath("s3://x") / "y"}) == 1
