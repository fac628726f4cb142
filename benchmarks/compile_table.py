"""Numbers of compiled kernels in CSV files, and ceilings that they must not exceed."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
COMPILED = HERE / "compiled.csv"
"""What the kernels compile to, by fingerprint, so that none is compiled again unchanged."""
CEILINGS = HERE / "compile_ceilings.csv"

Record = TypeVar("Record", bound="Row | Ceiling")


@dataclass(frozen=True)
class Row:
    """A kernel of one case, compiled for one target."""

    triton: str
    target: str
    case: str
    kernel: str
    num_warps: int
    num_stages: int
    shared_bytes: int
    """Of a program."""
    registers: int
    """Of a thread."""
    stack: int
    """Bytes of a thread's local memory: what registers are spilled to."""
    tensor_core: int
    """Instructions that multiply matrices."""
    copies_16: int
    """Instructions that copy 16 bytes a thread from global to shared memory, asynchronously."""
    accesses_16: int
    """Instructions that load or store 16 bytes a thread of global memory."""
    instructions: int
    loop: int
    """Instructions of one turn of the main loop, which every warp runs."""
    issued: float
    """Instructions that all warps of a program issue in the main loop, per ``unit``."""
    unit: str
    fingerprint: str
    """Of the source and the launch."""

    @property
    def name(self) -> str:
        """Without the version of Triton."""
        return f"{self.target} {self.case} {self.kernel.removesuffix('_kernel').strip('_')}"


@dataclass(frozen=True)
class Ceiling:
    """The most that a kernel may take, whatever Triton compiles it."""

    target: str
    case: str
    kernel: str
    registers: int
    stack: int
    shared_bytes: int
    issued: float
    tensor_core: bool
    """Has to have such instructions."""
    copies_16: bool
    """Has to have such instructions."""
    accesses_16: bool
    """Has to have such instructions."""


_MOST = ("registers", "stack", "shared_bytes", "issued")
_SOME = ("tensor_core", "copies_16", "accesses_16")


def above_ceilings(rows: Iterable[Row], ceilings: Iterable[Ceiling]) -> list[str]:
    """A line for each number that is above its ceiling, naming kernel, number and ceiling."""
    by_name = {(c.target, c.case, c.kernel): c for c in ceilings}
    lines = []
    for row in rows:
        where = f"{row.name} (Triton {row.triton})"
        ceiling = by_name.get((row.target, row.case, row.kernel))
        if ceiling is None:
            lines.append(f"{where}: has no ceiling in {CEILINGS.name}")
            continue
        for number in _MOST:
            found, most = getattr(row, number), getattr(ceiling, number)
            if found > most:
                lines.append(f"{where}: {number} {found:g} is above its ceiling of {most:g}")
        lines += [
            f"{where}: {number} 0, where such instructions have to be"
            for number in _SOME
            if getattr(ceiling, number) and not getattr(row, number)
        ]
    return lines


def ceilings_of(rows: Iterable[Row]) -> list[Ceiling]:
    """What rows have now, as ceilings: of several versions of Triton the larger number."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.target, row.case, row.kernel), []).append(row)
    return [
        Ceiling(
            *place,
            **{number: max(getattr(row, number) for row in group) for number in _MOST},
            **{number: all(getattr(row, number) for row in group) for number in _SOME},
        )
        for place, group in groups.items()
    ]


def read(path: Path, record: type[Record]) -> list[Record]:
    """Records of a CSV file; none where there is no such file.

    Raises:
        ValueError: a line is not of the record's columns; the message has file and line.
    """
    if not path.exists():
        return []
    parse = {entry.name: _PARSE[str(entry.type)] for entry in fields(record)}
    with path.open(newline="") as file:
        found = []
        for line, values in enumerate(csv.DictReader(file), 2):
            try:
                found.append(record(**{name: parse[name](text) for name, text in values.items()}))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {line}: {error!r}") from error
        return found


def write(path: Path, records: Iterable[Row | Ceiling]) -> None:
    """Write records of one kind, in order of their columns."""
    ordered = sorted(records, key=astuple)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(ordered[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, ordered))


def _bool(text: str) -> bool:
    return {"True": True, "False": False}[text]


_PARSE: dict[str, Any] = {"str": str, "int": int, "float": float, "bool": _bool}
