"""Writes the output of a run as JSON, one object per line on stderr.

Pipes replace stderr and stdout, and threads read the pipes. Lines that libraries or child processes
write therefore also become objects.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Event, Lock, Thread

from batchinfer.console.format import printable
from batchinfer.console.meter import Meter
from batchinfer.console.phases import phase_line
from batchinfer.console.progress_bar import Lines, MeteredProgress, Progress
from batchinfer.console.terminal import LINE_EVERY_S
from batchinfer.console.text_view import Display, Level

PROGRESS_EVERY_S = 10.0
MOST_OF_LINE = 1 << 16
"""Maximum number of bytes of a captured line in memory; a longer line becomes several objects."""
_WAIT_S = 2.0
"""Seconds to wait for the reader of a captured stream."""


class JsonLog:
    """Writes one JSON object per line; ``clock`` returns seconds since 1970."""

    def __init__(
        self, write: Callable[[bytes], object], clock: Callable[[], float] = time.time
    ) -> None:
        self._write = write
        self._clock = clock
        self._lock = Lock()
        self._ended = False
        self._last_error = ""

    def line(self, event: str, message: str, level: Level = "info", **fields: object) -> bytes:
        """Format an object as a line; values in ``fields`` that are not JSON become text."""
        at = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        head = {"time": at.replace("+00:00", "Z"), "level": level, "event": event}
        return json.dumps({**head, "message": message, **fields}, default=str).encode() + b"\n"

    def emit(self, event: str, message: str, level: Level = "info", **fields: object) -> None:
        """Write an object, unless the reader has closed the stream or ``end`` was called."""
        line = self.line(event, message, level, **fields)
        if level == "error":
            self._last_error = message
        with self._lock:
            if not self._ended:
                self._put(line)

    def end(self, exit_code: int, message: str, level: Level) -> None:
        """Write the last object; an error without a message repeats the last error."""
        if level == "error":
            message = message or self._last_error
        line = self.line("exit", message, level, exit_code=exit_code)
        with self._lock:
            self._ended = True
            self._put(line)

    def _put(self, line: bytes) -> None:
        try:
            self._write(line)
        except OSError:
            self._ended = True


class CapturedStream:
    """Turns each line that this process or a child writes to a stream into a JSON object."""

    def __init__(self, descriptor: int, name: str, log: JsonLog) -> None:
        self._name = name
        self._log = log
        self._mark = f"\0{os.urandom(8).hex()}".encode()
        self._marked = Event()
        reader, self._writer = os.pipe()
        os.dup2(self._writer, descriptor)
        Thread(target=self._read, args=(reader,), daemon=True).start()

    def sync(self) -> None:
        """Wait until the log contains everything written so far."""
        os.write(self._writer, b"\n" + self._mark + b"\n")
        self._marked.wait(_WAIT_S)

    def _read(self, reader: int) -> None:
        with os.fdopen(reader, "rb") as stream:
            while line := stream.readline(MOST_OF_LINE):
                if line.rstrip(b"\n") == self._mark:
                    self._marked.set()
                elif line.strip():
                    text = printable(line.decode(errors="replace").rstrip(), 2000)
                    self._log.emit("output", text, stream=self._name)


class JsonProgram:
    """Writes the JSON log of a program, and captures its streams until it exits.

    Args:
        keep_stdout: True to leave stdout unchanged, because the caller reads a result from it.
    """

    def __init__(self, *, keep_stdout: bool) -> None:
        self.descriptor = os.dup(2)
        """The original stderr, which receives the log."""
        self.log = JsonLog(self._write)
        names = {2: "stderr"} if keep_stdout else {2: "stderr", 1: "stdout"}
        self._streams = [CapturedStream(fd, name, self.log) for fd, name in names.items()]
        logging.basicConfig(handlers=[_Records(self.log)], force=True)

    def _write(self, line: bytes) -> None:
        while line:  # a signal may interrupt the write
            line = line[os.write(self.descriptor, line) :]

    def end(self, exit_code: int, message: str = "") -> None:
        """Write the last object, with the exit code and the error."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        for captured in self._streams:
            captured.sync()
        self.log.end(exit_code, message, "error" if exit_code else "info")


class _Records(logging.Handler):
    """Writes log records of libraries as objects."""

    def __init__(self, log: JsonLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        level: Level = "warning" if record.levelno < logging.ERROR else "error"
        text = printable(record.getMessage(), 2000)
        self._log.emit("log", text, level, logger=record.name)


class JsonDisplay(Display):
    """Writes the events of a run as objects of a log; writes only errors if ``quiet``."""

    def __init__(self, log: JsonLog, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._log = log
        self.phases = None if quiet else _JsonPhases(log)

    def progress(self, meter: Meter) -> Progress:
        return MeteredProgress(meter) if self._quiet else _JsonProgress(meter, self._log)

    def _write(
        self, event: str, text: str, level: Level, is_result: bool, fields: dict[str, object]
    ) -> None:
        self._log.emit(event, text, level, **fields)


class _JsonPhases:
    def __init__(self, log: JsonLog) -> None:
        self._log = log
        self._next_s = 0.0

    def lasts(self, name: str, detail: str, seconds: float) -> None:
        if seconds >= self._next_s:
            self._next_s = max(LINE_EVERY_S, 2 * seconds)
            self._emit("phase", name, detail, seconds)

    def ended(self, name: str, detail: str, seconds: float) -> None:
        self._next_s = 0.0
        self._emit("phase_ended", name, detail, seconds)

    def _emit(self, event: str, name: str, detail: str, seconds: float) -> None:
        text = phase_line(name, detail, seconds)
        self._log.emit(event, text, phase=name, detail=detail, seconds=round(seconds, 3))


class _JsonProgress(Lines):
    def __init__(self, meter: Meter, log: JsonLog) -> None:
        super().__init__(
            meter,
            lambda: log.emit("progress", meter.line, **meter.facts()),
            PROGRESS_EVERY_S,
            lambda line: log.emit("stalled", line, "warning"),
        )

    def close(self) -> None:
        super().close()
        self._write()
