"""``on_end``: tells a webhook or a command how a run ended."""

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
from queue import Empty, Queue
from threading import Thread
from urllib.parse import unquote_to_bytes, urlsplit

from batchinfer.console.display import Display
from batchinfer.errors import ExitCode, JobError
from batchinfer.job.spec.sections import OnEndSpec
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.stats.live import WatchedRun

LIMIT_S = 30.0
MOST_OUTPUT = 64 << 10
"""Bytes of what a command prints that are passed on."""
_OUTCOMES = {
    ExitCode.OK: "succeeded",
    ExitCode.TOO_MANY_ROW_ERRORS: "too_many_errors",
    ExitCode.INTERRUPTED: "stopped",
}
_STDERR = 2
_CHUNK = 1 << 16
_PASSED_ON_S = 1.0
"""For the last of what a command has printed; what it has started may print for longer."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended, as it is told."""

    job: str
    outcome: str
    """``succeeded``, ``too_many_errors``, ``stopped`` or ``failed``."""
    exit_code: int
    output: str
    """The output directory, or its URL."""
    summary: str | None
    """``summary.json`` of a job that has ended; None: it has not."""
    rows: Mapping[str, int] | None
    """``total``, ``finished`` and ``error``, of all runs; of one that was stopped or failed,
    ``error`` is of that run. None: it was not known yet."""
    error: str | None
    """What went wrong, of a run that failed."""


@contextmanager
def notify_on_end(
    spec: JobSpec, watched: WatchedRun, display: Display, *, alone: bool
) -> Iterator[Callable[[ExitCode], None]]:
    """Send ``on_end``'s notification once the run inside has ended.

    A run that finds nothing to do sends none. Of several processes that share a job, only the one
    that ends the job sends one.

    Args:
        alone: whether no other process works on the job.

    Yields:
        Takes the run's exit code; errors that leave the block give their own.
    """
    asked = spec.on_end
    if asked.webhook is None and asked.command is None:
        yield lambda _: None
        return
    codes: list[ExitCode] = []
    try:
        yield codes.append
    except Exception as error:
        if alone or watched.summary is not None:
            code = error.exit_code if isinstance(error, JobError) else ExitCode.BUG
            _send(asked, _run_end(spec, watched, code, error), display)
        raise
    was_stopped = alone and codes == [ExitCode.INTERRUPTED]
    if codes and (watched.summary is not None or was_stopped):
        _send(asked, _run_end(spec, watched, codes[0]), display)


def _run_end(
    spec: JobSpec, watched: WatchedRun, code: ExitCode, error: Exception | None = None
) -> RunEnd:
    summary = watched.summary
    rows, meter = None, watched.meter
    if summary is not None:
        total = summary["rows"]["total"]
        rows = {"total": total, "finished": total, "error": summary["rows"]["error"]}
    elif meter is not None:
        whole, done = meter.before + meter.total, meter.before + meter.counts.rows
        rows = {"total": whole, "finished": done, "error": meter.failed}
    place = spec.output.path.rstrip("/")
    return RunEnd(
        job=spec.name,
        outcome=_OUTCOMES.get(code, "failed"),
        exit_code=int(code),
        output=spec.output.path,
        summary=None if summary is None else f"{place}/summary.json",
        rows=rows,
        error=_reason(error),
    )


def _reason(error: Exception | None) -> str | None:
    if error is None:
        return None
    return str(error) if isinstance(error, JobError) else "a bug of batchinfer; see its crash log"


def _send(asked: OnEndSpec, end: RunEnd, display: Display) -> None:
    """Send the notification; a failure is shown and changes nothing."""
    message = json.dumps(asdict(end)).encode()
    if asked.webhook is not None:
        problem = _within_limit(_poster(asked.webhook, message))
    else:
        problem = _run_command(asked.command or (), message)
    if problem is not None:
        display.say("on_end_failed", f"{asked.named}: {problem}", "error")


def _within_limit(call: Callable[[], str | None]) -> str | None:
    """What goes wrong with a call; it is left where it takes too long."""
    problems: Queue[str | None] = Queue()
    Thread(target=lambda: problems.put(call()), daemon=True).start()
    try:
        return problems.get(timeout=LIMIT_S)
    except Empty:
        return f"no answer within {LIMIT_S:g} s"


def _poster(url: str, message: bytes) -> Callable[[], str | None]:
    """Posts a message, and gives what goes wrong; no more of the URL is told than is known."""
    place, credentials = _split_credentials(url)
    headers = {"Content-Type": "application/json", "User-Agent": "batchinfer"}

    def post() -> str | None:
        try:
            request = urllib.request.Request(place, message, headers, method="POST")
            if credentials is not None:
                request.add_unredirected_header("Authorization", f"Basic {credentials}")
            with urllib.request.urlopen(request, timeout=LIMIT_S):
                return None
        except urllib.error.HTTPError as error:
            error.close()
            return f"it answered {error.code}"
        except urllib.error.URLError as error:
            return _problem(error.reason)
        except Exception as error:  # of http.client, of proxies; some repeat the URL
            return _problem(error)

    return post


def _split_credentials(url: str) -> tuple[str, str | None]:
    """A URL without user and password, which urllib takes for its host, and those in base64."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    encoded = base64.b64encode(unquote_to_bytes(user)).decode()
    return parts._replace(netloc=host).geturl(), encoded


def _problem(reason: object) -> str:
    """An error of the system in its words; of any other, its kind alone."""
    if isinstance(reason, OSError) and reason.strerror:
        return str(reason.strerror)
    return f"it failed ({type(reason).__name__})"


def _run_command(command: tuple[str, ...], message: bytes) -> str | None:
    """Run a command with a message on its stdin; the beginning of what it prints goes to stderr."""
    printed, output = os.pipe()
    passing = Thread(target=_pass_on, args=(printed,), daemon=True)
    passing.start()
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
    except OSError as error:
        return str(error.strerror)
    finally:
        os.close(output)
    try:
        return _outcome(process, message)
    finally:
        passing.join(_PASSED_ON_S)


def _outcome(process: subprocess.Popen[bytes], message: bytes) -> str | None:
    """What goes wrong with a command that was started."""
    try:
        process.communicate(message, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.wait()
        return f"it was killed after {LIMIT_S:g} s"
    return f"it ended with {process.returncode}" if process.returncode else None


def _pass_on(printed: int) -> None:
    """Pass on what a command prints, and say of how much that was not done."""
    left, num_left_out = MOST_OUTPUT, 0
    with os.fdopen(printed, "rb", buffering=0) as stream, suppress(OSError):
        while data := stream.read(_CHUNK):
            _write_all(data[:left])
            num_left_out += max(0, len(data) - left)
            left = max(0, left - len(data))
        if num_left_out:
            _write_all(f"\non_end.command: {num_left_out:,} more bytes are left out\n".encode())


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(_STDERR, data) :]
