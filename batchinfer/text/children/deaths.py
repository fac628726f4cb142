"""What a child died of, in words, and whether that is the row's doing beyond doubt."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from batchinfer.text.children.limits import Limits

_MAX_TOLD_CHARS = 200
_OUT_OF_MEMORY = "memory allocation of"
"""What Rust's runtime writes before it aborts."""


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a child."""

    what: str
    """The rest of a sentence about whoever ran."""
    is_certain: bool = False
    """Whether it depends on the row alone: not on the rows before it, nor on the machine."""
    is_bug: bool = False
    """Whether it is none of the rows' doing."""
    is_from_outside: bool = False
    """Whether somebody else killed it: no limit of ours does so."""


def death(limits: Limits, exit_code: int, stderr: str, said: tuple[str, str] | None) -> Death:
    """What a child died of.

    Args:
        limits: its.
        exit_code: of the process; minus the signal that ended it.
        stderr: what it wrote.
        said: cause and text of the message ``failed``, if it came to that.
    """
    memory = f"needed over {limits.memory_bytes >> 20} MiB of memory"
    if said is not None:
        cause, text = said
        if cause == "bug":
            return Death(text, is_bug=True)
        told = {"memory": memory, "recursion": "is nested too deeply"}
        return Death(told.get(cause, f"failed: {_one_line(text)}"))
    if exit_code == -signal.SIGPROF:
        return Death(f"took over {limits.cpu_seconds:g} s of processor time", is_certain=True)
    if exit_code == -signal.SIGALRM:
        return Death(f"took over {limits.seconds:g} s")
    if exit_code == -signal.SIGABRT and _OUT_OF_MEMORY in stderr:
        return Death(memory)
    if exit_code == -signal.SIGKILL:
        return Death("was killed (SIGKILL)", is_from_outside=True)
    lines = stderr.strip().splitlines()
    told_last = f": {_one_line(lines[-1])}" if lines else ""
    return Death(f"ended its process ({_name(exit_code)}){told_last}")


def _name(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_TOLD_CHARS]
