"""Where tracebacks of bugs go."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.cli.program import crash_directory, write_crash_log


@pytest.mark.parametrize("exists", [True, False])
def test_a_traceback_goes_to_the_output_directory_if_that_exists(
    tmp_path: Path, exists: bool
) -> None:
    directory = tmp_path if exists else tmp_path / "missing"
    with pytest.raises(ZeroDivisionError) as caught, crash_directory(directory):
        raise ZeroDivisionError("oh \udcff no")
    log = write_crash_log(caught.value)
    assert "ZeroDivisionError: oh \\udcff no" in log.read_text()
    assert (log.parent == directory) == exists
    assert directory.exists() == exists
    log.unlink()
