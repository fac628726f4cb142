"""Runs a command: prints its output, writes crash logs, and exits with the right code."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.errors import ExitCode, JobError
from batchinfer.process.process import ignore_signals, leave_on_signals

if TYPE_CHECKING:
    from batchinfer.console.json_log import JsonLog, JsonProgram

MAX_MESSAGE_LINES = 12
_CLICK_INTERRUPTED = 130
"""Click's exit code for Ctrl-C."""


def run_program(app: Callable[..., object]) -> None:
    """Run the command that the arguments name, and exit with its code."""
    leave_as_asked()
    code, complaint = _outcome(app)
    ignore_signals()  # a signal must not change the exit code anymore
    shown = "\n".join(complaint.splitlines()[:MAX_MESSAGE_LINES])
    if _json_programs:
        _json_programs[-1].end(int(code or 0), shown)
    elif shown:
        with suppress(OSError):
            print(shown, file=sys.stderr, flush=True)
    sys.exit(code)


def leave_as_asked() -> None:
    """Make signals end the process at once, after a last message in the format of ``--log-format``.

    This function looks for the option in the unparsed arguments, because a signal may arrive before
    parsing.
    """
    arguments = sys.argv[1:]
    if "--log-format=json" not in arguments and ("--log-format", "json") not in pairwise(arguments):
        leave_on_signals()
        return
    from batchinfer.console.json_log import JsonLog

    _leave_in_json(JsonLog(lambda line: os.write(2, line)), 2)


def _leave_in_json(log: JsonLog, descriptor: int) -> None:
    stopped = "stopped; run the same command again"
    leave_on_signals(
        lambda: log.line("exit", stopped, "error", exit_code=int(ExitCode.INTERRUPTED)),
        descriptor,
    )


_json_programs: list[JsonProgram] = []
"""Holds the JSON log of this program, if it writes one."""


def log_as_json(*, keep_stdout: bool) -> JsonLog:
    """Write all further messages as a JSON log on stderr; its last object has the exit code.

    Args:
        keep_stdout: True to leave stdout unchanged, because the caller reads a result from it.
    """
    from batchinfer.console.json_log import JsonProgram

    program = JsonProgram(keep_stdout=keep_stdout)
    _json_programs.append(program)
    _leave_in_json(program.log, program.descriptor)
    return program.log


def _outcome(app: Callable[..., object]) -> tuple[int | str | None, str]:
    """Run a command, and return its exit code and an error message (or "")."""
    try:
        app(prog_name="batchinfer")
    except SystemExit as done:
        return (ExitCode.INTERRUPTED if done.code == _CLICK_INTERRUPTED else done.code), ""
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED, ""
    except JobError as error:
        return error.exit_code, str(error)
    except Exception as error:
        if _is_full_stdout(error):
            sys.stdout = None  # Python flushes stdout at exit, which would fail again
            problem = "cannot write to stdout: its disk is full; free space or write elsewhere"
            return ExitCode.STORAGE, problem
        try:
            return ExitCode.BUG, (
                "a bug in batchinfer ended the command; please report it with "
                f"{write_crash_log(error)}"
            )
        except OSError:  # the crash log could not be written
            return ExitCode.BUG, "".join(traceback.format_exception(error))
    return ExitCode.OK, ""


def _is_full_stdout(error: Exception) -> bool:
    """Return True if the disk of stdout is full. Errors about other files have a file name."""
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def to_json(data: Any) -> str:
    import json

    return json.dumps(data, indent=2)


@contextmanager
def crash_directory(directory: Path) -> Iterator[None]:
    """Write the crash log of a bug inside this block to ``directory``, if the folder exists."""
    try:
        yield
    except Exception as error:
        error.crash_directory = directory  # type: ignore[attr-defined]
        raise


def write_crash_log(error: Exception) -> Path:
    """Write the traceback of ``error`` to a new file in its crash directory or to a temporary file.

    Raises:
        OSError: no file can be written.
    """
    directory: Path | None = getattr(error, "crash_directory", None)
    if directory is not None:
        with suppress(OSError):
            return _write(error, directory)
    return _write(error, None)


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
