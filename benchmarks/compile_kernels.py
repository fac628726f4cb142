"""Compiles Triton kernels for NVIDIA GPUs that are not there, by calling their wrappers."""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from compile_cases import Case
from compile_table import Row
from sass import Compiled, read_cubin
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from batchinfer.kernels import fp8, launch

_CONVERTS_FP8 = 89
"""From this compute capability on there are instructions for float8."""
_IMPORTED = re.compile(r"^from (batchinfer\.kernels\.\w+) import", re.MULTILINE)


class _Target:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device: another number for another target.
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Stands in for Triton's launches: kernels are compiled, none is run.

    Args:
        known: rows of kernels that need not be compiled again if they are as they were, of this
            and of other versions of Triton.
    """

    def __init__(self, known: list[Row]) -> None:
        self._versions = sorted({triton.__version__, *(row.triton for row in known)})
        self._known = {(row.triton, row.case, row.fingerprint): row for row in known}
        self._case: Case | None = None
        self._capability = 0
        self._rows: dict[str, list[Row]] = {}
        self._compile = JITFunction.run
        JITFunction.run = lambda function, *args, **kwargs: self._launched(function, args, kwargs)
        launch.INTERPRETED = True  # lets CPU tensors through; their pointers are never followed

    def rows(self, case: Case, capability: int) -> Iterator[Row]:
        """Rows of a case's kernels, of other versions of Triton those that are known.

        Raises:
            ValueError: the case does not launch a kernel that it names.
        """
        driver.set_active(_Target(capability))
        fp8.converts_fp8 = lambda device: capability >= _CONVERTS_FP8
        self._case, self._capability, self._rows = case, capability, {}
        case.launch()
        if missing := set(case.kernels) - set(self._rows):
            raise ValueError(f"{case.name} does not launch {', '.join(sorted(missing))}")
        for found in self._rows.values():
            yield from found

    def _launched(self, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
        assert self._case is not None
        name = function.fn.__name__
        if name not in self._case.kernels:
            return
        arguments = kwargs | dict(zip(function.arg_names, args, strict=False))
        mark = _fingerprint(function, arguments, self._capability)
        rows = [self._known.get((version, self._case.name, mark)) for version in self._versions]
        found = self._rows[name] = [row for row in rows if row is not None]
        if all(row.triton != triton.__version__ for row in found):
            kernel = self._compile(function, *args, **kwargs | {"warmup": True})
            target = f"sm_{self._capability}"
            found.append(_row(target, self._case.name, name, kernel, arguments, mark))


def _row(
    target: str, case: str, name: str, kernel: Any, arguments: dict[str, Any], fingerprint: str
) -> Row:
    compiled = _read(kernel.asm["cubin"])
    amount, unit = _work(arguments)
    return Row(
        triton=triton.__version__,
        target=target,
        case=case,
        kernel=name,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        shared_bytes=kernel.metadata.shared,
        **asdict(compiled),
        issued=round(compiled.loop * kernel.metadata.num_warps / amount, 1),
        unit=unit,
        fingerprint=fingerprint,
    )


def _read(cubin: bytes) -> Compiled:
    tools = triton.knobs.nvidia
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return read_cubin(Path(file.name), tools.cuobjdump.path, tools.nvdisasm.path)


def _work(arguments: dict[str, Any]) -> tuple[float, str]:
    """What one turn of a kernel's main loop gets done, and in which unit."""
    if {"OUTPUTS_BLOCK", "BLOCK"} <= arguments.keys():
        return _linear_work(arguments["ROWS"], arguments["OUTPUTS_BLOCK"], arguments["BLOCK"])
    if "TILE" not in arguments:
        return 1, "turn"
    tile, rows = arguments["TILE"], arguments["ROWS"]
    if "TOKENS" in arguments:
        return tile * rows / (64 * 128), "64 keys x 128 rows"
    if "RANK" in arguments:
        stored = arguments["RANK"] + arguments["ROTARY"]
        return tile * stored * arguments["cache_ptr"].element_size() / 1024, "KiB of KV"
    cache = arguments["cache"]
    widths = cache.KEY_WIDTH.value + cache.VALUE_WIDTH.value
    return tile * widths * cache.key_ptr.element_size() / 1024, "KiB of KV"


def _linear_work(rows: int, outputs: int, width: int) -> tuple[float, str]:
    """Few rows take the time that reading the weights takes, many that of multiplying."""
    if rows <= 64:
        return outputs * width / 1024, "KiB of weight"
    return rows * outputs * width / 128**3, "128 x 128 x 128"


def _fingerprint(function: Any, arguments: dict[str, Any], capability: int) -> str:
    """Of all that decides what a kernel compiles to, but for the version of Triton."""
    launched = {name: _described(value) for name, value in arguments.items() if name != "grid"}
    told = (
        function.fn.__name__,
        capability,
        sorted(launched.items()),
        _sources(function.fn.__module__),
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _described(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_described, value))
    return str(value.dtype) if isinstance(value, torch.Tensor) else value


@cache
def _sources(module: str) -> str:
    """A hash of a module of kernels and those that it imports."""
    waiting, texts = [module], {}
    while waiting:
        name = waiting.pop()
        if name not in texts:
            texts[name] = Path(str(sys.modules[name].__file__)).read_text()
            waiting += _IMPORTED.findall(texts[name])
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()
