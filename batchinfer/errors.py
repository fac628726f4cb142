"""Errors a user can cause and mend, with the exit code each ends in."""

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
    """A mistake the user can mend: what is wrong, where, and what to do about it.

    The command prints ``str(error)`` and exits with ``error.exit_code``; no traceback.
    """

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n{hint}")
        self.message = message
        """What is wrong, without what to do about it."""


class UsageError(JobError):
    """The command line or the job file is wrong; names the key and the line."""


class NotYetError(UsageError):
    """A feature that the contract names and this version does not build."""

    def __init__(self, what: str) -> None:
        super().__init__(f"not yet: {what} is not supported by this version")


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
    """Writing to the output failed, or reading what was written."""

    exit_code = ExitCode.STORAGE


class RowError(Exception):
    """One row cannot be run; it becomes an error row with this code, the job goes on."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[RowError], tuple[Any, ...]]:
        return RowError, (self.code, self.message)


def one_line(error: BaseException, most: int = 300) -> str:
    """An error's message on one line of at most ``most`` characters; its class where it has none.

    For errors of libraries, which may go on for a page, and repeat what a damaged file has: what
    cannot be printed is escaped.
    """
    line = " ".join(str(error).split())[:most]
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
    return "".join(shown)[:most] or type(error).__name__


_SUMMARY = "Run a language model over a whole Parquet dataset"
"""What the summary of this project's distribution begins with."""


def install_command(extra: str) -> str:
    """What to type for the packages of an extra, as the end of a message.

    It names a checkout, as this project's name on the package index belongs to somebody else; where
    that one is installed, it says so.

    Args:
        extra: a name under ``[project.optional-dependencies]`` of ``pyproject.toml``.
    """
    command = f"pip install '.[{extra}]' in a checkout of this project"
    other = _other_distribution()
    if other is None:
        return command
    return f"pip uninstall batchinfer, which is another project's ({other}), then {command}"


def _other_distribution() -> str | None:
    """Version of a distribution of this name that is not this project; None: there is none."""
    from importlib import metadata  # it takes 20 ms, and no run without such an error needs it

    try:
        found = metadata.metadata("batchinfer")
    except metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return None
    is_ours = "Summary" in found and found["Summary"].startswith(_SUMMARY)
    return None if is_ours else found["Version"]
