"""``on_end``: notifies a webhook or a command of the end of a run."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from threading import Thread
from urllib.parse import unquote_to_bytes, urlsplit

from batchinfer.console.text_view import Display
from batchinfer.errors import ExitCode, JobError
from batchinfer.job.spec.sections import OnEndSpec
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.stats.live import WatchedRun

LIMIT_S = 30.0
MOST_OUTPUT = 64 << 10
"""Maximum number of bytes of a command's output to copy to stderr."""
_OUTCOMES = {
    ExitCode.OK: "succeeded",
    ExitCode.TOO_MANY_ROW_ERRORS: "too_many_errors",
    ExitCode.INTERRUPTED: "stopped",
}
_STDERR = 2
_CHUNK = 1 << 16
_COPY_S = 1.0
"""Seconds to wait for the last output of a command that has ended. The wait is limited because the
command's child processes may go on printing.
"""


@dataclass(frozen=True)
class RunEnd:
    job: str
    outcome: str
    """``succeeded``, ``too_many_errors``, ``stopped`` or ``failed``."""
    exit_code: int
    output: str
    """The output directory, or its URL."""
    summary: str | None
    """Path of ``summary.json``; None if the job has not ended."""
    rows: Mapping[str, int] | None
    """Numbers of rows over all runs: ``total``, ``finished`` and ``error``. If this run was stopped
    or failed, ``error`` counts only this run's rows. None if the numbers are not known yet."""
    error: str | None


@contextmanager
def notify_on_end(
    spec: JobSpec, watched: WatchedRun, display: Display, *, alone: bool
) -> Iterator[Callable[[ExitCode], None]]:
    """Send the notification of ``on_end`` once the run in this context has ended.

    A run that finds nothing to do sends no notification. If several processes share a job, only the
    process that ends the job sends the notification.

    Args:
        alone: True if no other process works on the job.

    Yields:
        A function that takes the run's exit code.
    """
    target = spec.on_end
    if target.webhook is None and target.command is None:
        yield lambda _: None
        return
    codes: list[ExitCode] = []
    try:
        yield codes.append
    except Exception as error:
        if alone or watched.summary is not None:
            code = error.exit_code if isinstance(error, JobError) else ExitCode.BUG
            _send(target, _run_end(spec, watched, code, error), display)
        raise
    was_stopped = alone and codes == [ExitCode.INTERRUPTED]
    if codes and (watched.summary is not None or was_stopped):
        _send(target, _run_end(spec, watched, codes[0]), display)


def _run_end(
    spec: JobSpec, watched: WatchedRun, code: ExitCode, error: Exception | None = None
) -> RunEnd:
    summary, meter = watched.summary, watched.meter
    rows = None
    if summary is not None:
        total = summary["rows"]["total"]
        rows = {"total": total, "finished": total, "error": summary["rows"]["error"]}
    elif meter is not None:
        total, done = meter.before + meter.total, meter.before + meter.counts.rows
        rows = {"total": total, "finished": done, "error": meter.failed}
    reason = None if error is None else "a bug in batchinfer; see its crash log"
    return RunEnd(
        job=spec.name,
        outcome=_OUTCOMES.get(code, "failed"),
        exit_code=int(code),
        output=spec.output.path,
        summary=None if summary is None else f"{spec.output.path.rstrip('/')}/summary.json",
        rows=rows,
        error=str(error) if isinstance(error, JobError) else reason,
    )


def _send(target: OnEndSpec, end: RunEnd, display: Display) -> None:
    """Send the notification; if this fails, only show the problem."""
    message = json.dumps(asdict(end)).encode()
    if target.webhook is not None:
        problem = _within_limit(partial(_post, target.webhook, message))
    else:
        problem = _run_command(target.command or (), message)
    if problem is not None:
        display.say("on_end_failed", f"{target.named}: {problem}", "error")


def _within_limit(call: Callable[[], str | None]) -> str | None:
    """Return the problem that ``call`` returns, or a problem if it takes over ``LIMIT_S``."""
    problems: list[str | None] = []
    thread = Thread(target=lambda: problems.append(call()), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return problems[0] if problems else f"no answer within {LIMIT_S:g} s"


def _post(url: str, message: bytes) -> str | None:
    """Post a message; return the problem without the URL, which may be a secret."""
    place, credentials = _split_credentials(url)
    headers = {"Content-Type": "application/json", "User-Agent": "batchinfer"}
    try:
        request = urllib.request.Request(place, message, headers, method="POST")
        if credentials is not None:
            request.add_unredirected_header("Authorization", f"Basic {credentials}")
        with urllib.request.urlopen(request, timeout=LIMIT_S):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        return f"the server answered with HTTP status {error.code}"
    except urllib.error.URLError as error:
        return _problem(error.reason)
    except Exception as error:  # errors of http.client or a proxy may contain the URL
        return _problem(error)


def _split_credentials(url: str) -> tuple[str, str | None]:
    """Return a URL without its credentials, and "user:password" in base64; None without
    credentials.

    urllib does not accept credentials in a URL.
    """
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    encoded = base64.b64encode(unquote_to_bytes(user)).decode()
    return parts._replace(netloc=host).geturl(), encoded


def _problem(reason: object) -> str:
    """Return the system's message for an OSError, and only the type of other errors."""
    if isinstance(reason, OSError) and reason.strerror:
        return str(reason.strerror)
    return f"the request failed ({type(reason).__name__})"


def _run_command(command: tuple[str, ...], message: bytes) -> str | None:
    """Run a command with a message on its stdin; return the problem, if any.

    The beginning of the command's output goes to stderr.
    """
    printed, output = os.pipe()
    copying = Thread(target=_copy_to_stderr, args=(printed,), daemon=True)
    copying.start()
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
    except OSError as error:
        return str(error.strerror)
    finally:
        os.close(output)
    try:
        process.communicate(message, timeout=LIMIT_S)
        return (
            f"the command ended with exit code {process.returncode}" if process.returncode else None
        )
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # including its child processes
        process.wait()
        return f"the command was killed after {LIMIT_S:g} s"
    finally:
        copying.join(_COPY_S)


def _copy_to_stderr(printed: int) -> None:
    """Copy the first bytes of a command's output to stderr, and print how many are left out."""
    room, num_left_out = MOST_OUTPUT, 0
    with os.fdopen(printed, "rb", buffering=0) as stream, suppress(OSError):
        while data := stream.read(_CHUNK):
            _write_all(data[:room])
            num_left_out += max(0, len(data) - room)
            room = max(0, room - len(data))
        if num_left_out:
            _write_all(
                f"\non_end.command: {num_left_out:,} more bytes of output are left out\n".encode()
            )


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(_STDERR, data) :]
