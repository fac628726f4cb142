"""Where tracebacks of bugs go."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.cli.program import crash_directory, write_crash_log


@pytest.mark.parametrize("exists", [True, False])
def test_crash_log_is_written_to_an_existing_output_directory(tmp_path: Path, exists: bool) -> None:
    directory = tmp_path if exists else tmp_path / "missing"
    with pytest.raises(ZeroDivisionError) as caught, crash_directory(directory):
        raise ZeroDivisionError("oh \udcff no")
    log = write_crash_log(caught.value)
    assert "ZeroDivisionError: oh \\udcff no" in log.read_text()
    assert (log.parent == directory) == exists
    assert directory.exists() == exists
    log.unlink()
