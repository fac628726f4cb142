"""Reads a compiled CUDA kernel: its registers, and the instructions of its main loop.

Uses NVIDIA's tools from Triton's wheel: ``cuobjdump`` prints the resource usage, ``nvdisasm`` the
SASS (machine instructions).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_LABEL = re.compile(r"^(\.L\w+):", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)$")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_TENSOR_CORE = re.compile(r"[HIQ]G?MMA\b")
_COPY_16 = re.compile(r"LDGSTS\S*\.128|UTMALDG|UBLKCP")
_ACCESS_16 = re.compile(r"(LDG|STG)\b\S*\.128")


@dataclass(frozen=True)
class Instruction:
    """One line of SASS: the name, such as ``LDGSTS.E.BYPASS.128``, and its operands."""

    name: str
    operands: str


@dataclass(frozen=True)
class Compiled:
    registers: int
    stack: int
    """Bytes of local memory per thread, which spilled registers use."""
    tensor_core: int
    """Instructions that multiply matrices (HMMA, HGMMA)."""
    copies_16: int
    """Instructions that copy 16 bytes per thread from global to shared memory, asynchronously."""
    accesses_16: int
    """Instructions that load or store 16 bytes per thread of global memory."""
    instructions: int
    loop: int
    """Instructions in one iteration of the main loop; 0 if there is no loop."""


def read_cubin(path: Path, cuobjdump: str, nvdisasm: str) -> Compiled:
    """Read a cubin file with one kernel.

    Raises:
        ValueError: the output of the tools cannot be parsed.
    """
    usage = _USAGE.search(_output_of(cuobjdump, "--dump-resource-usage", str(path)))
    if usage is None:
        raise ValueError(f"{path}: the output of cuobjdump has no register count")
    instructions, labels = parse(_output_of(nvdisasm, "-c", "-ndf", str(path)))
    if not instructions:
        raise ValueError(f"{path}: the output of nvdisasm has no instructions")
    return Compiled(
        registers=int(usage[1]),
        stack=int(usage[2]),
        tensor_core=_count(_TENSOR_CORE, instructions),
        copies_16=_count(_COPY_16, instructions),
        accesses_16=_count(_ACCESS_16, instructions),
        instructions=len(instructions),
        loop=len(main_loop(instructions, labels)),
    )


def parse(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """Parse SASS into instructions and, for each label, the index of the next instruction."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.match(line):
            instructions.append(Instruction(found[1], found[2]))
    return instructions, labels


def main_loop(instructions: Sequence[Instruction], labels: dict[str, int]) -> list[Instruction]:
    """Return the loop in which a kernel spends most of its time.

    The result is the shortest innermost loop with tensor core instructions, or else the longest
    innermost loop. (In attention, a longer copy of the main loop, with masks, computes the last
    tiles.)
    """
    spans = []
    for at, instruction in enumerate(instructions):
        target = _TARGET.search(instruction.operands) if instruction.name == "BRA" else None
        if target is not None and labels.get(target[1], at + 1) < at:
            spans.append((labels[target[1]], at + 1))
    inner = [
        (start, end)
        for start, end in spans
        if not any(
            (start, end) != other and start <= other[0] and other[1] <= end for other in spans
        )
    ]
    loops = [list(instructions[start:end]) for start, end in inner]
    gemm_loops = [loop for loop in loops if _count(_TENSOR_CORE, loop)]
    if gemm_loops:
        return min(gemm_loops, key=len)
    return max(loops, key=len, default=[])


def _count(pattern: re.Pattern[str], instructions: Sequence[Instruction]) -> int:
    return sum(pattern.match(instruction.name) is not None for instruction in instructions)


def _output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
