"""Explains why a worker process died, and whether its row is certainly the cause."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from batchinfer.text.processes.limits import Limits

_MAX_TOLD_CHARS = 200
_OUT_OF_MEMORY = "memory allocation of"
"""Printed by Rust's runtime before it aborts."""
_COMPUTES_S = 0.1
"""A process with less processor time than this only waited."""
_KILLED = "another process killed it (SIGKILL), as the system does when it runs out of memory"


@dataclass(frozen=True, slots=True)
class End:
    """How a worker process ended, from the system."""

    exit_code: int
    """Negative for a signal."""
    stderr: str
    """The end of its stderr."""
    cpu_seconds: float
    """Processor time that it used in total."""


@dataclass(frozen=True, slots=True)
class Death:
    """Why a worker process died."""

    what: str
    """The predicate of a sentence whose subject is the template or the tokenizer."""
    is_certain: bool = False
    """Whether the row alone caused it, not earlier rows or the machine."""
    is_bug: bool = False
    """Whether it is a bug of this program, not caused by rows."""
    is_out_of_time: bool = False
    """Whether it ran out of wall-clock time, which also passes while the process is paused."""
    outside: str | None = None
    """A cause outside the process, if it was stopped or kept from computing by one."""


def death(limits: Limits, seconds: float, end: End, said: tuple[str, str] | None) -> Death:
    """Explain why a worker process died.

    Args:
        seconds: its limit of wall-clock time.
        said: cause and text of its message ``failed``, if it sent one.
    """
    memory = f"needed over {limits.memory_bytes >> 20} MiB of memory"
    if said is not None:
        cause, text = said
        if cause == "bug":
            return Death(text, is_bug=True)
        told = {"memory": memory, "recursion": "is nested too deeply"}
        return Death(told.get(cause, f"failed: {_one_line(text)}"))
    if end.exit_code == -signal.SIGPROF:
        return Death(f"took over {limits.cpu_seconds:g} s of processor time", is_certain=True)
    if end.exit_code == -signal.SIGALRM:
        return _out_of_time(seconds, end.cpu_seconds)
    if end.exit_code == -signal.SIGABRT and _OUT_OF_MEMORY in end.stderr:
        return Death(memory)
    if end.exit_code == -signal.SIGKILL:
        return Death("was killed (SIGKILL)", outside=_KILLED)
    lines = end.stderr.strip().splitlines()
    told_last = f": {_one_line(lines[-1])}" if lines else ""
    return Death(f"ended its process ({_name(end.exit_code)}){told_last}")


def _out_of_time(seconds: float, cpu_seconds: float) -> Death:
    what = f"took over {seconds:g} s"
    if cpu_seconds < _COMPUTES_S:
        return Death(what, is_out_of_time=True)
    # It did compute, yet reached no limit of processor time: the machine was too busy.
    had = f"the machine let it compute for {cpu_seconds:.1f} s in {seconds:g} s"
    return Death(what, is_out_of_time=True, outside=had)


def _name(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_TOLD_CHARS]
