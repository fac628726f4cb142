from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from batchinfer.job.storage import content_hash as hashing
from batchinfer.job.storage.content_hash import content_hash


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hashing, "_CHUNK_BYTES", 1000)
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 10)
    old = time.time() - 100
    os.utime(path, (old, old))
    return path


def kept(file: Path) -> list[Path]:
    return list((file.parent / "cache" / "batchinfer" / "content-hashes").iterdir())


@pytest.mark.parametrize("at", [0, 999, 1000, 2559])
def test_content_hash_depends_on_every_byte(file: Path, at: int) -> None:
    before = content_hash(file)
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)
    assert content_hash(file) != before


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2559])
def test_content_hash_depends_on_the_length(file: Path, size: int) -> None:
    before = content_hash(file)
    file.write_bytes(file.read_bytes()[:size])
    assert content_hash(file) != before


def test_content_hash_is_equal_for_equal_files(file: Path) -> None:
    copy = file.with_name("copy")
    copy.write_bytes(file.read_bytes())
    assert content_hash(copy) == content_hash(file)


def test_content_hash_of_an_unchanged_file_is_cached(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = content_hash(file)
    assert len(kept(file)) == 1
    monkeypatch.delattr(hashing, "_hash")
    assert content_hash(file) == found


def test_content_hash_of_a_new_file_is_not_cached(file: Path) -> None:
    os.utime(file)
    content_hash(file)
    assert kept(file) == []


def test_content_hash_detects_a_reset_modification_time(file: Path) -> None:
    before, status = content_hash(file), file.stat()
    raw = file.read_bytes()
    file.write_bytes(raw[::-1])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert content_hash(file) != before


@pytest.mark.parametrize("torn", [b"", b"{}", b"[1]", b'{"facts": {}, "hash": "x"}'])
def test_content_hash_replaces_a_damaged_cache(file: Path, torn: bytes) -> None:
    found = content_hash(file)
    kept(file)[0].write_bytes(torn)
    assert content_hash(file) == found
    assert kept(file)[0].read_bytes() != torn


def test_content_hash_ignores_a_cache_writable_by_others(file: Path) -> None:
    found = content_hash(file)
    folder = kept(file)[0].parent
    kept(file)[0].write_text(kept(file)[0].read_text().replace(found, "0" * 64))
    folder.chmod(0o777)
    assert content_hash(file) == found


def test_content_hash_without_cache_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = content_hash(file)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert content_hash(file) == found
