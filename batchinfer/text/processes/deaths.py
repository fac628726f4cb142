"""What a child died of, in words, and whether that is the row's doing beyond doubt."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from batchinfer.text.processes.limits import Limits

_MAX_TOLD_CHARS = 200
_OUT_OF_MEMORY = "memory allocation of"
"""What Rust's runtime writes before it aborts."""
_COMPUTES_S = 0.1
"""Processor time from which on a process did not just wait."""
_KILLED = "something else has killed it (SIGKILL), as the system does when it is out of memory"


@dataclass(frozen=True, slots=True)
class End:
    """How a child ended, as the system tells."""

    exit_code: int
    """Minus the signal that ended it."""
    stderr: str
    """What it wrote last."""
    cpu_seconds: float
    """Processor time that it took in its life."""


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a child."""

    what: str
    """The rest of a sentence about whoever ran."""
    is_certain: bool = False
    """Whether it depends on the row alone: not on the rows before it, nor on the machine."""
    is_bug: bool = False
    """Whether it is none of the rows' doing."""
    is_out_of_time: bool = False
    """Whether its time was over, not its processor time: of who was paused it soon is."""
    outside: str | None = None
    """What kept it from its work that is no row's doing, in words."""


def death(limits: Limits, seconds: float, end: End, said: tuple[str, str] | None) -> Death:
    """What a child died of.

    Args:
        seconds: time it had, computing or not.
        said: cause and text of the message ``failed``, if it came to that.
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
    # It has computed, and was not done nor over its processor time: it had too little of a machine.
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
