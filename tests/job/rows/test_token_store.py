from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.request import TokenIds
from batchinfer.errors import StorageError
from batchinfer.job.rows.token_store import TokenStore, token_ids
from tests.job.spilled import bytes_in_files

ROWS = [[5, 300], [], [256], [2**31 - 1, 0, 0], [0], [7] * 40]


def ids(row: list[int]) -> TokenIds:
    return np.array(row, dtype=np.int32)


def filled(store: TokenStore, rows: list[list[int]] = ROWS, size: int = 2) -> TokenStore:
    for start in range(0, len(rows), size):
        store.add([ids(row) for row in rows[start : start + size]])
    return store


@pytest.mark.parametrize("budget", [0, 20, 10_000])
def test_rows_are_read_back(tmp_path: Path, budget: int) -> None:
    store = filled(TokenStore(tmp_path, budget))
    assert [token_ids(key).tolist() for key in store.rows()] == ROWS
    assert {token_ids(key).dtype for key in store.rows()} == {np.dtype(np.int32)}
    in_arrow = [np.frombuffer(key, ">u4").tolist() for key in store.as_arrow().to_pylist()]
    assert in_arrow == ROWS


def test_only_what_is_over_the_budget_goes_to_files(tmp_path: Path) -> None:
    store = filled(TokenStore(tmp_path, 20))
    assert bytes_in_files(store) == 4 * sum(map(len, ROWS))
    assert bytes_in_files(filled(TokenStore(tmp_path, 10_000))) == 0


def open_below(folder: Path) -> list[str]:
    """Open files of a folder; not all that are open: other threads open and close some."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [path for path in found if path.startswith(f"{folder}/")]


def test_files_have_no_name_and_end_with_whoever_reads_them(tmp_path: Path) -> None:
    store = filled(TokenStore(tmp_path, 0))
    assert bytes_in_files(store) > 0
    assert list(tmp_path.iterdir()) == []
    assert open_below(tmp_path)
    key = store.rows()[0]
    del store
    assert token_ids(key).tolist() == ROWS[0], "a row may outlive the store"
    del key
    assert open_below(tmp_path) == []


def test_a_file_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        filled(TokenStore(tmp_path / "gone", 0))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=8))
def test_keys_compare_as_token_ids(rows: list[list[int]]) -> None:
    keys = filled(TokenStore(None), rows).as_arrow().to_pylist()
    assert [rows[at] for at in sorted(range(len(rows)), key=keys.__getitem__)] == sorted(rows)


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
import numpy as np
from batchinfer.job.rows.token_store import TokenStore
from tests.job.spilled import bytes_in_files
store = TokenStore(Path({str(tmp_path)!r}), 0)
store.add([np.arange(1000, dtype=np.int32)])
assert bytes_in_files(store) == 4000
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
