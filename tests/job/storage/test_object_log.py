"""Log files in an object store, to which runs append lines."""

from __future__ import annotations

from threading import Event

import pytest

from batchinfer.errors import StorageError
from batchinfer.job.storage import object_filesystem
from batchinfer.job.storage.object_filesystem import EVERY_S, KEPT_BYTES, StoreLog


class Store:
    """Records the uploads; the test sets its clock."""

    def __init__(self) -> None:
        self.put: list[bytes] = []
        self.now = 1000.0
        self.log = StoreLog(self.put.append, lambda: self.now)


def test_store_log_uploads_at_once_after_a_pause_and_rarely_otherwise() -> None:
    store = Store()
    store.log.write(b"a")
    store.log.write(b"b")
    assert store.put == [b"a"]
    store.now += EVERY_S
    store.log.write(b"c")
    assert store.put == [b"a", b"abc"]
    store.log.write(b"d")
    store.log.close()
    store.log.close()
    assert store.put == [b"a", b"abc", b"abcd"]


def test_store_log_uploads_later_lines_without_another_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_filesystem, "EVERY_S", 0.001)
    there = Event()
    log = StoreLog(lambda data: there.set() if data == b"ab" else None, lambda: 0.0)
    log.write(b"a")
    log.write(b"b")
    assert there.wait(60)
    log.close()


def test_store_log_uploads_on_flush() -> None:
    put: list[bytes] = []
    log = StoreLog(put.append, lambda: 0.0)
    log.write(b"a")
    log.write(b"b")
    log.flush()
    assert put == [b"a", b"ab"]
    log.close()


def test_store_log_keeps_its_end() -> None:
    store = Store()
    store.log.write(bytes(KEPT_BYTES))
    store.log.write(b"end")
    store.log.close()
    assert len(store.put[-1]) == KEPT_BYTES
    assert store.put[-1].endswith(b"end")


def test_store_log_ignores_failed_uploads() -> None:
    def refuse(data: bytes) -> None:
        raise StorageError("no")

    log = StoreLog(refuse)
    log.write(b"a")
    log.close()
