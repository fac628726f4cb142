"""Errors that a user can cause and fix, with the exit code of each."""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of every command; pipelines branch on them."""

    OK = 0
    BUG = 1
    USAGE = 2
    TOO_MANY_ROW_ERRORS = 3
    DATA = 4
    MODEL = 5
    DEVICE = 6
    LOCKED = 7
    STORAGE = 8
    INTERRUPTED = 75


class JobError(Exception):
    """An error that the user can fix. The message says what is wrong and what to do about it.

    The command prints ``str(error)`` and exits with ``error.exit_code``; no traceback.
    """

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n{hint}")
        self.message = message
        """The error's description, without the hint."""


class UsageError(JobError):
    """The command line or the job file is wrong; the message names the key and the line."""


class NotYetError(UsageError):
    """A planned feature that this version does not support yet."""

    def __init__(self, what: str, *, hint: str | None = None) -> None:
        super().__init__(f"{what} is not yet supported by this version", hint=hint)


class DataError(JobError):
    """Input or output data is unreadable, corrupt, or changed since the plan."""

    exit_code = ExitCode.DATA


class ModelError(JobError):
    """The model or its tokenizer cannot be loaded or cannot be run."""

    exit_code = ExitCode.MODEL


class DeviceError(JobError):
    """The device is missing or too small."""

    exit_code = ExitCode.DEVICE


class LockedError(JobError):
    """The output directory is in use, or holds another job's output."""

    exit_code = ExitCode.LOCKED


class StorageError(JobError):
    """Writing the output, or reading it back, failed."""

    exit_code = ExitCode.STORAGE


class RowError(Exception):
    """A row cannot be run; it becomes an error row with this code, and the job continues."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[RowError], tuple[Any, ...]]:
        return RowError, (self.code, self.message)


def one_line(error: BaseException, most: int = 300) -> str:
    """Return an error's message, or its class name if it has none, on one line.

    A library's message may fill a page or repeat bytes of a damaged file, so the line has at most
    ``most`` characters, and unprintable characters are escaped.
    """
    line = " ".join(str(error).split())[:most]
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
    return "".join(shown)[:most] or type(error).__name__


_SUMMARY = "Run a language model over a whole Parquet dataset"
"""Start of the summary in this project's package metadata."""


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra, to be put at the end of an error message.

    The command installs from a checkout, because the name on the package index belongs to another
    project. If that project is installed, the command uninstalls it first.

    Args:
        extra: a name under ``[project.optional-dependencies]`` of ``pyproject.toml``.
    """
    command = f"pip install '.[{extra}]' in a checkout of this project"
    other = _other_distribution()
    if other is None:
        return command
    return f"pip uninstall batchinfer (version {other}, which is another project's), then {command}"


def _other_distribution() -> str | None:
    """Return the version of another project that is installed under this name, or None."""
    from importlib import metadata  # takes 20 ms, and only this message needs it

    try:
        package = metadata.metadata("batchinfer")
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return None
    is_ours = "Summary" in package and package["Summary"].startswith(_SUMMARY)
    return None if is_ours else package["Version"]
