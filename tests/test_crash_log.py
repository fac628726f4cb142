"""Where tracebacks of bugs go."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.cli.program import CrashError, crash_directory, write_crash_log
from batchinfer.errors import DataError


def crash_in(directory: Path) -> CrashError:
    with pytest.raises(CrashError) as caught, crash_directory(directory):
        raise ZeroDivisionError("oh \udcff no")
    return caught.value


def test_the_traceback_goes_to_the_output_directory(tmp_path: Path) -> None:
    log = write_crash_log(crash_in(tmp_path))
    assert log.parent == tmp_path
    assert "ZeroDivisionError: oh \\udcff no" in log.read_text()


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    log = write_crash_log(crash_in(missing))
    assert "ZeroDivisionError" in log.read_text()
    assert not missing.exists()
    log.unlink()


def test_mistakes_of_the_user_are_no_crash(tmp_path: Path) -> None:
    with pytest.raises(DataError), crash_directory(tmp_path):
        raise DataError("bad file")
    assert list(tmp_path.iterdir()) == []
