"""Compiles Triton kernels for NVIDIA GPUs that are not there, by calling their wrappers."""

from __future__ import annotations

import csv
import hashlib
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from compile_cases import Case
from sass import Compiled, read_cubin
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from batchinfer.kernels import fp8, launch

COMPILED = Path(__file__).resolve().parent / "compiled.csv"
"""What the kernels compile to, by fingerprint, so that none is compiled again unchanged."""
_CONVERTS_FP8 = 89
"""From this compute capability on there are instructions for float8."""
_IMPORTED = re.compile(r"^from (batchinfer\.kernels\.\w+) import", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """A kernel of one case, compiled for one target; counts as in `Compiled`."""

    triton: str
    target: str
    case: str
    kernel: str
    num_warps: int
    num_stages: int
    shared_bytes: int  # of a program
    registers: int
    stack: int
    tensor_core: int
    copies_16: int
    accesses_16: int
    instructions: int
    loop: int
    issued: float  # instructions that all warps of a program issue in the main loop, per `unit`
    unit: str
    fingerprint: str  # of the source and the launch

    @property
    def name(self) -> str:
        """Target, case and kernel."""
        return f"{self.target} {self.case} {self.kernel.removesuffix('_kernel').strip('_')}"


def read(path: Path) -> list[Row]:
    """Rows of a CSV file; none where there is no such file."""
    if not path.exists():
        return []
    parse = {
        field.name: {"str": str, "int": int, "float": float}[str(field.type)]
        for field in fields(Row)
    }
    with path.open(newline="") as file:
        lines = csv.DictReader(file)
        return [Row(**{name: parse[name](text) for name, text in line.items()}) for line in lines]


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows, in order of their columns."""
    with path.open("w", newline="") as file:
        names = [field.name for field in fields(Row)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, sorted(rows, key=astuple)))


def regressions(rows: Iterable[Row], kept: Iterable[Row]) -> list[str]:
    """A line for each kernel that is worse than the kept one: more than a tenth more instructions,
    a larger stack, or no products on tensor cores or copies of 16 bytes where it had some."""
    before = {(row.triton, row.name): row for row in kept}
    lines = []
    for row in rows:
        old, where = before.get((row.triton, row.name)), f"{row.name} (Triton {row.triton})"
        if old is None:
            continue
        if row.issued > 1.1 * old.issued:
            lines.append(f"{where}: issues {row.issued:g} per {row.unit}, {old.issued:g} before")
        if row.stack > old.stack:
            lines.append(f"{where}: a stack of {row.stack} bytes, {old.stack} before")
        lines += [
            f"{where}: {name} 0, {getattr(old, name)} before"
            for name in ("tensor_core", "copies_16")
            if getattr(old, name) and not getattr(row, name)
        ]
    return lines


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
