"""Products and attention in a program without Python: here, and on an emulated Arm processor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchinfer.kernels.cpu import library
from tests.kernels.cpu_driver import run_driver

_ARM = {
    "neon": ("-march=armv8-a", "cortex-a57", "product bf16", "NEON"),
    "neon_bf16": ("-march=armv8.6-a", "max", "product bf16", "NEON BF16"),
}


@pytest.mark.skipif(library.load() is None, reason="no C compiler here")
def test_on_this_processor(tmp_path: Path) -> None:
    said = run_driver(tmp_path, os.environ.get("CC", "cc"), *library.for_this_processor())
    assert "product f32" in said


@pytest.mark.parametrize(("flag", "processor", "line", "name"), _ARM.values(), ids=_ARM.keys())
def test_on_arm(flag: str, processor: str, line: str, name: str, tmp_path: Path) -> None:
    emulator = ("qemu-aarch64", "-cpu", processor)
    said = run_driver(tmp_path, "aarch64-linux-gnu-gcc", flag, "-static", emulator=emulator)
    assert any(x.startswith(line) and x.endswith(f" {name}") for x in said.splitlines())
