"""Where the traceback of a bug goes: a file, so that the screen keeps one line."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchinfer.errors import JobError


class CrashError(Exception):
    """A bug, ``__cause__``, met while working on the output in ``directory``."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self.directory = directory


@contextmanager
def crash_directory(directory: Path) -> Iterator[None]:
    """Have a bug met inside logged in ``directory``, if that exists by then.

    Raises:
        CrashError: from whatever was raised inside that is not a ``JobError``.
    """
    try:
        yield
    except JobError:
        raise
    except Exception as error:
        raise CrashError(directory) from error


def write_crash_log(error: Exception) -> Path:
    """Write the traceback of ``error``, a ``CrashError`` or any other, to a new file.

    Returns:
        The file: in the crash's directory where that can be written, else a temporary file.

    Raises:
        OSError: no file can be written at all.
    """
    if not isinstance(error, CrashError):
        return _write(error, None)
    cause = error.__cause__ or error
    try:
        return _write(cause, error.directory)
    except OSError:
        return _write(cause, None)


def _write(error: BaseException, directory: Path | None) -> Path:
    with tempfile.NamedTemporaryFile(
        "w",
        prefix="crash-",
        suffix=".log",
        dir=directory,
        delete=False,
        encoding="utf-8",
        errors="backslashreplace",
    ) as file:
        file.writelines(traceback.format_exception(error))
    return Path(file.name)
