"""The program around its commands: output, exit codes, crash logs.

The traceback of a bug goes to a file, so that the screen keeps one line.
"""

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
"""What click makes of Ctrl-C."""


def run_program(app: Callable[..., object]) -> None:
    """Run the command that the arguments name, and exit with its code."""
    leave_as_asked()
    code, complaint = _outcome(app)
    ignore_signals()  # the exit code is settled
    _end(code, complaint)
    sys.exit(code)


def leave_as_asked() -> None:
    """``leave_on_signals`` with a last word in the format that the arguments ask for.

    They are looked at before any is parsed: a signal may come while the commands are imported.
    """
    asked = sys.argv[1:]
    if "--log-format=json" not in asked and ("--log-format", "json") not in pairwise(asked):
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
"""The log of this program, where that is in JSON."""


def log_as_json(*, keep_stdout: bool) -> JsonLog:
    """Have all that is said from now on be objects of a JSON log on stderr, the last the exit code.

    Args:
        keep_stdout: stdout has a result that the caller reads.
    """
    from batchinfer.console.json_log import JsonProgram

    program = JsonProgram(keep_stdout=keep_stdout)
    _json_programs.append(program)
    _leave_in_json(program.log, program.descriptor)
    return program.log


def _end(code: int | str | None, complaint: str) -> None:
    if _json_programs:
        _json_programs[-1].end(int(code or 0), _cut(complaint))
    elif complaint:
        with suppress(OSError):
            print(_cut(complaint), file=sys.stderr, flush=True)


def _cut(message: str) -> str:
    return "\n".join(message.splitlines()[:MAX_MESSAGE_LINES])


def _outcome(app: Callable[..., object]) -> tuple[int | str | None, str]:
    """The exit code of a command, and what it complains of."""
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
            sys.stdout = None  # Python flushes once more at exit; give it nothing to fail on
            problem = "cannot write to stdout: its disk is full; free space or write elsewhere"
            return ExitCode.STORAGE, problem
        return ExitCode.BUG, _bug(error)
    return ExitCode.OK, ""


def _is_full_stdout(error: Exception) -> bool:
    """Whether ``error`` came of printing: errors about files name the file."""
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _bug(error: Exception) -> str:
    try:
        return f"batchinfer met a bug; please report it with {write_crash_log(error)}"
    except OSError:  # nowhere to write: the screen is the last place left
        return "".join(traceback.format_exception(error))


def to_json(data: Any) -> str:
    """Data as the JSON text that commands print."""
    import json

    return json.dumps(data, indent=2)


def print_stdout(text: str) -> None:
    """Print to stdout; whoever closed it has read enough."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes once more at exit; give it nothing to fail on.
        sys.stdout = None


class CrashError(Exception):
    """A bug, ``__cause__``, met while working on the output in ``directory``."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self.directory = directory


@contextmanager
def crash_directory(directory: Path) -> Iterator[None]:
    """Log a bug met inside to ``directory``, if that exists by then.

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
