"""Ids of runs: ``run-00003``, or ``run-00003-s0001of4`` if several runs wrote at the same time."""

from __future__ import annotations

import re

_RUN_ID = re.compile(r"run-(\d+)(?:-([a-z]\w*))?")


def run_id(number: int, writer: str = "") -> str:
    """Return the id of a run; ``writer`` is "" for a run that writes alone."""
    return f"run-{number:05d}{writer and '-'}{writer}"


def run_number(name: str) -> int:
    """Return the number in the run id at the start of a file's name; 0 if there is no run id."""
    match = _RUN_ID.match(name)
    return int(match.group(1)) if match else 0


def writer_of(name: str) -> str:
    """Return the writer in a run's id; "" for a run that wrote alone."""
    match = _RUN_ID.fullmatch(name)
    return (match and match.group(2)) or ""
