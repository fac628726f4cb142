"""Finds out why a worker process died, and whether its row is certainly the cause."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from batchinfer.text.processes.limits import Limits

_MAX_MESSAGE_CHARS = 200
_OUT_OF_MEMORY = "memory allocation of"
"""Text that Rust's runtime prints before it aborts."""
_COMPUTES_S = 0.1
"""Processor time in seconds. A process that used less time was only waiting."""
_KILLED = "another process killed it (SIGKILL), as the system does when it runs out of memory"


@dataclass(frozen=True, slots=True)
class End:
    """Facts from the operating system about the end of a worker process."""

    exit_code: int
    """Exit code of the process, negative for a signal."""
    stderr: str
    """End of the text that the process wrote to stderr."""
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Death:
    predicate: str
    """Predicate for a sentence that begins with "the template" or "the tokenizer"."""
    is_certain: bool = False
    """True if the row alone caused the death, not earlier rows or the machine."""
    is_of_image: bool = False
    """True if the image processor caused the death, not a template or the tokenizer."""
    is_bug: bool = False
    """True if the cause is a bug in this program, not a row."""
    is_out_of_time: bool = False
    """True if the process ran out of wall-clock time, which also passes while it is paused."""
    outside: str | None = None
    """Cause outside the process, if something else stopped it or kept it from computing."""


def death(limits: Limits, seconds: float, end: End, failure: tuple[str, str] | None) -> Death:
    """Explain why a worker process died.

    Args:
        seconds: limit of wall-clock time for the process.
        failure: cause and text of the process's message ``failed``, if it sent one.
    """
    memory = f"needed more than {limits.memory_bytes >> 20} MiB of memory"
    if failure is not None:
        cause, text = failure
        if cause == "bug":
            return Death(text, is_bug=True)
        if cause == "image":
            return Death(memory, is_of_image=True)
        known = {"memory": memory, "recursion": "is nested too deeply"}
        return Death(known.get(cause, f"failed: {_one_line(text)}"))
    if end.exit_code == -signal.SIGPROF:
        return Death(f"took more than {limits.cpu_seconds:g} s of processor time", is_certain=True)
    if end.exit_code == -signal.SIGALRM:
        return _out_of_time(seconds, end.cpu_seconds)
    if end.exit_code == -signal.SIGABRT and _OUT_OF_MEMORY in end.stderr:
        return Death(memory)
    if end.exit_code == -signal.SIGKILL:
        return Death("was killed (SIGKILL)", outside=_KILLED)
    lines = end.stderr.strip().splitlines()
    last_line = f": {_one_line(lines[-1])}" if lines else ""
    return Death(f"ended its process ({_name(end.exit_code)}){last_line}")


def _out_of_time(seconds: float, cpu_seconds: float) -> Death:
    predicate = f"took more than {seconds:g} s"
    if cpu_seconds < _COMPUTES_S:
        return Death(predicate, is_out_of_time=True)
    # The process computed without reaching its limit of processor time: the machine was too busy.
    outside = f"the machine gave it only {cpu_seconds:.1f} s of processor time in {seconds:g} s"
    return Death(predicate, is_out_of_time=True, outside=outside)


def _name(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_MESSAGE_CHARS]
