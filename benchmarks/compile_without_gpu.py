"""Compiles Triton kernels for NVIDIA GPUs without a GPU, by calling their wrappers."""

from __future__ import annotations

import ast
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
"""Table of compiled kernels. A kernel with an unchanged fingerprint is not compiled again."""
_CONVERTS_FP8 = 89
_IMPORTED = re.compile(r"^from (batchinfer\.kernels\.\w+) import", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """A kernel of one case, compiled for one target. `Compiled` explains the counts."""

    triton: str
    target: str
    case: str
    kernel: str
    num_warps: int
    num_stages: int
    shared_bytes: int  # shared memory of a program
    registers: int
    stack: int
    tensor_core: int
    copies_16: int
    accesses_16: int
    instructions: int
    loop: int
    issued: float  # instructions that all warps of a program issue in the main loop, per `unit`
    unit: str
    fingerprint: str  # hash of source and launch arguments

    @property
    def name(self) -> str:
        return f"{self.target} {self.case} {self.kernel.removesuffix('_kernel').strip('_')}"


def read(path: Path) -> list[Row]:
    """Return no rows if the file does not exist."""
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
    with path.open("w", newline="") as file:
        names = [field.name for field in fields(Row)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, sorted(rows, key=astuple)))


def regressions(rows: Iterable[Row], kept: Iterable[Row]) -> list[str]:
    """Compare rows with stored rows, and return a line for each regression: over 10 % more
    instructions, a larger stack, or the loss of all tensor core instructions or of all 16-byte
    copies."""
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
    """The part of a Triton driver that compiling needs."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        # Triton caches compiled kernels by device number, so each target needs a different number.
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Replaces Triton's launches: compiles kernels without running them.

    Args:
        known: rows for all Triton versions; kernels with equal fingerprints are not compiled again.
    """

    def __init__(self, known: list[Row]) -> None:
        self._versions = sorted({triton.__version__, *(row.triton for row in known)})
        self._known = {(row.triton, row.case, row.fingerprint): row for row in known}
        self._case: Case | None = None
        self._capability = 0
        self._rows: dict[str, list[Row]] = {}
        self._compile = JITFunction.run
        JITFunction.run = lambda function, *args, **kwargs: self._launched(function, args, kwargs)
        launch.INTERPRETED = True  # accepts CPU tensors; their pointers are never read

    def rows(self, case: Case, capability: int) -> Iterator[Row]:
        """Yield the rows of a case's kernels, and the known rows for other versions of Triton."""
        driver.set_active(_Target(capability))
        fp8.converts_fp8 = lambda device: capability >= _CONVERTS_FP8
        self._case, self._capability, self._rows = case, capability, {}
        case.launch()
        if missing := set(case.kernels) - set(self._rows):
            raise ValueError(f"{case.name} does not launch {', '.join(sorted(missing))}")
        for rows in self._rows.values():
            yield from rows

    def _launched(self, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
        assert self._case is not None
        name = function.fn.__name__
        if name not in self._case.kernels:
            return
        arguments = kwargs | dict(zip(function.arg_names, args, strict=False))
        mark = _fingerprint(function, arguments, self._capability)
        known = [self._known.get((version, self._case.name, mark)) for version in self._versions]
        rows = self._rows[name] = [row for row in known if row is not None]
        if all(row.triton != triton.__version__ for row in rows):
            kernel = self._compile(function, *args, **kwargs | {"warmup": True})
            target = f"sm_{self._capability}"
            rows.append(_row(target, self._case.name, name, kernel, arguments, mark))


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
    """Return the work of one iteration of a kernel's main loop, and its unit."""
    if {"OUTPUTS_BLOCK", "BLOCK"} <= arguments.keys():
        element_bytes = 0.5 if "words_ptr" in arguments else 1
        return _linear_work(
            arguments["ROWS"], arguments["OUTPUTS_BLOCK"], arguments["BLOCK"], element_bytes
        )
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


def _linear_work(rows: int, outputs: int, width: int, element_bytes: float) -> tuple[float, str]:
    """Return the work of a linear layer: bytes of weights, without scales, for few rows, because
    reading weights then limits the speed; otherwise multiplications."""
    if rows <= 64:
        return outputs * width * element_bytes / 1024, "KiB of weight"
    return rows * outputs * width / 128**3, "128 x 128 x 128"


def _fingerprint(function: Any, arguments: dict[str, Any], capability: int) -> str:
    """Hash everything that determines the compiled code, except Triton's version."""
    launched = {name: _described(value) for name, value in arguments.items() if name != "grid"}
    inputs = (
        function.fn.__name__,
        capability,
        sorted(launched.items()),
        _source_hash(function.fn.__module__),
    )
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]


def _described(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_described, value))
    return str(value.dtype) if isinstance(value, torch.Tensor) else value


@cache
def _source_hash(module: str) -> str:
    """Hash the code, without comments and docstrings, of a kernel module and its imports."""
    waiting, codes = [module], {}
    while waiting:
        name = waiting.pop()
        if name not in codes:
            text = Path(str(sys.modules[name].__file__)).read_text()
            codes[name] = _without_docstrings(text)
            waiting += _IMPORTED.findall(text)
    return hashlib.sha256(repr(sorted(codes.items())).encode()).hexdigest()


def _without_docstrings(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [each for each in node.body if not _is_docstring(each)]
    return ast.dump(tree)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
