"""The signatures for which ``benchmarks/compile_report.py`` compiles kernels ahead of time."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction

from batchinfer.kernels import fp8
from tests.fake_cuda.launches import Launch, Signature, import_kernels, launch_of

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from compile_cases import CASES, Case
from compile_without_gpu import _CONVERTS_FP8, COMPILED, _Target, read

TARGETS = (80, 90)
Compiled = dict[int, dict[Signature, int]]
"""Bytes of shared memory of each signature in the report, for each target."""


def compiled_signatures(capability: int) -> dict[Signature, int]:
    """Return the signatures of all kernels that the report has for a compute capability, with
    the bytes of shared memory that a program needs.

    Raises:
        ValueError: the report lacks a kernel, or does not know for which signature it was compiled.
    """
    import_kernels()
    shared = _shared_bytes(capability)
    signatures: dict[Signature, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", False)
        patch.setattr(fp8, "converts_fp8", lambda _: capability >= _CONVERTS_FP8)
        patch.setattr(driver, "_active", _Target(capability))
        launches: list[Launch] = []

        def note(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            launches.append(launch_of(function, grid, args, options, capability))

        patch.setattr(InterpretedFunction, "run", note)
        for case in CASES:
            launches.clear()
            case.launch()
            for kernel in case.kernels:
                if (case.name, kernel) not in shared:
                    raise ValueError(f"compiled.csv lacks {case.name}: run `make compile-report`")
                signature = _only_signature(case, kernel, launches)
                most = max(shared[case.name, kernel], signatures.get(signature, 0))
                signatures[signature] = most
    return signatures


def _shared_bytes(capability: int) -> dict[tuple[str, str], int]:
    """Return the largest shared memory of the kernel of each case, of all versions of Triton."""
    found: dict[tuple[str, str], int] = {}
    for row in read(COMPILED):
        if row.target == f"sm_{capability}":
            key = row.case, row.kernel
            found[key] = max(found.get(key, 0), row.shared_bytes)
    return found


def _only_signature(case: Case, kernel: str, launches: Iterable[Launch]) -> Signature:
    signatures = {launch.signature for launch in launches if launch.kernel == kernel}
    if len(signatures) != 1:
        raise ValueError(f"{case.name} launches {kernel} with {len(signatures)} signatures")
    return signatures.pop()


def uncompiled(launches: Iterable[Launch], signatures: Collection[Signature]) -> list[str]:
    """Return a line for each signature that is not among ``signatures``, with its differences from
    the most similar one."""
    missing = dict.fromkeys(each.signature for each in launches if each.signature not in signatures)
    return [_line(signature, signatures) for signature in missing]


def _line(signature: Signature, signatures: Collection[Signature]) -> str:
    others = [other for other in signatures if other.kernel == signature.kernel]
    if not others:
        return f"{signature.kernel} is not compiled"
    differences = min((_differences(signature, other) for other in others), key=len)
    return f"{signature.kernel} is compiled only for other arguments: {'; '.join(differences)}"


def _differences(signature: Signature, other: Signature) -> list[str]:
    pairs = zip(signature.arguments, other.arguments, strict=True)
    found = [f"argument {at}: {a}, not {b}" for at, (a, b) in enumerate(pairs) if a != b]
    if signature.options != other.options:
        found.append(f"{signature.options}, not {other.options}")
    return found
