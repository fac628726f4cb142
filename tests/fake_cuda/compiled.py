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

from compile_cases import CASES
from compile_kernels import _CONVERTS_FP8, _Target

TARGETS = (80, 90)


def compiled_signatures(capability: int) -> frozenset[Signature]:
    """Return the signatures of all kernels in the report for a compute capability."""
    import_kernels()
    signatures: set[Signature] = set()
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
            signatures |= {each.signature for each in launches if each.kernel in case.kernels}
    return frozenset(signatures)


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
