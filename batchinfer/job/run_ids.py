"""Ids of runs: ``run-00003``, and ``run-00003-s0001of4`` where several wrote at once."""

from __future__ import annotations

import re

_RUN_ID = re.compile(r"run-(\d+)(?:-([a-z]\w*))?")


def run_id(number: int, writer: str = "") -> str:
    """The id of a run.

    Args:
        writer: as in ``OutputDir``.
    """
    return f"run-{number:05d}{writer and '-'}{writer}"


def run_number(name: str) -> int:
    """The number of the run that a file's name begins with; 0 if it begins with none."""
    match = _RUN_ID.match(name)
    return int(match.group(1)) if match else 0


def writer_of(name: str) -> str:
    """The writer in a run's id; "" for one that wrote alone."""
    match = _RUN_ID.fullmatch(name)
    return (match and match.group(2)) or ""
