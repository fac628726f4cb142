"""Launches of programs that stay: as many as run at a time, each taking work after work.

How many that is follows from what the compiler gave a program: registers, shared memory, warps
(NVIDIA, CUDA C++ Programming Guide: "Hardware Multithreading").
"""

from dataclasses import dataclass
from typing import Any

import torch

_WARP = 32  # threads
_REGISTERS = 65536  # of a multiprocessor, from compute capability 5.0 on
_PARTITIONS = 4  # of a multiprocessor, each with a fourth of the registers and warps
_REGISTERS_TOGETHER = 8  # of a thread are given out at once
_RESERVED_BYTES = 1024  # of shared memory, that the system takes of each program's
_INTERPRETED = 2  # programs of the interpreter, one after the other


@dataclass(frozen=True)
class Multiprocessor:
    """What one has for its programs."""

    shared_memory: int  # bytes
    threads: int
    programs: int  # at most

    @classmethod
    def of(cls, properties: Any) -> "Multiprocessor":
        """Read it from `torch.cuda.get_device_properties`."""
        return cls(
            properties.shared_memory_per_multiprocessor,
            properties.max_threads_per_multi_processor,
            programs=32,
        )


def programs_each(has: Multiprocessor, registers: int, shared_memory: int, num_warps: int) -> int:
    """Programs that a multiprocessor runs at a time; one at least.

    Args:
        registers: of a thread.
        shared_memory: of a program, in bytes.
    """
    registers = -(-registers // _REGISTERS_TOGETHER) * _REGISTERS_TOGETHER
    warps = _REGISTERS // _PARTITIONS // (registers * _WARP) * _PARTITIONS
    fit = (
        warps // num_warps,
        has.shared_memory // (shared_memory + _RESERVED_BYTES),
        has.threads // (num_warps * _WARP),
        has.programs,
    )
    return max(1, min(fit))


_resident: dict[tuple[Any, ...], int] = {}


def launch_resident(kernel: Any, most: int, **arguments: Any) -> None:
    """Launch as many programs as run at a time, or `most` where that is fewer."""
    kernel[(min(most, num_resident(kernel, **arguments)),)](**arguments)


def num_resident(kernel: Any, **arguments: Any) -> int:
    """Programs that run at a time.

    The kernel is compiled to be asked, once for every set of constants and types.
    """
    device = arguments["query_ptr"].device
    if device.type != "cuda":
        return _INTERPRETED
    key = (kernel, device, *map(_constant, arguments.items()))
    if key not in _resident:
        compiled = kernel.warmup(**arguments, grid=(1,))
        _resident[key] = resident_programs(compiled, torch.cuda.get_device_properties(device))
    return _resident[key]


def _constant(argument: tuple[str, Any]) -> Any:
    """What a kernel is compiled for of an argument: its value if it is a constant, or its dtype."""
    name, value = argument
    if isinstance(value, tuple):
        names = getattr(value, "_fields", [""] * len(value))
        return tuple(map(_constant, zip(names, value, strict=True)))
    return getattr(value, "value", value) if name.isupper() else getattr(value, "dtype", None)


def resident_programs(compiled: Any, properties: Any) -> int:
    """Programs of a compiled kernel that a device runs at a time."""
    compiled._init_handles()  # loads it, which tells the registers
    metadata = compiled.metadata
    each = programs_each(
        Multiprocessor.of(properties), compiled.n_regs, metadata.shared, metadata.num_warps
    )
    return int(each * properties.multi_processor_count)
