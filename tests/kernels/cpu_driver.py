"""The C kernels built into a program of their own (``cpu_driver.c``), and what it says."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from batchinfer.kernels.cpu import compiled_library

_SOURCES = (
    *("encoder_layers.c", "gemm.c", "gemm_groups.c", "gemm_int8.c"),
    *("paged_attention.c", "row_ops.c", "gemm_rows.c", "amx_tiles.c"),
)
_NOT_KNOWN = "unrecognized", "unknown value", "cannot find -l"
_PER_BUILD = ("-O3", "-fPIC", "-shared")


def run_driver(folder: Path, compiler: str, *flags: str, emulator: tuple[str, ...] = ()) -> str:
    """The program's output; skips where a tool is missing, fails where the program does."""
    for tool in (compiler, *emulator[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not here")
    kernels, program = Path(compiled_library.__file__).parent, folder / "driver"
    sources = [Path(__file__).with_suffix(".c"), *(kernels / name for name in _SOURCES)]
    shared = [flag for flag in compiled_library.FLAGS if flag not in _PER_BUILD]
    command = [compiler, "-O2", *shared, *flags, f"-I{kernels}", *map(str, sources)]
    built = subprocess.run([*command, "-o", str(program), "-lm"], capture_output=True, text=True)
    if any(words in built.stderr for words in _NOT_KNOWN):
        pytest.skip(f"{compiler} does not know {' '.join(flags)}")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run(
        [*emulator, str(program)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},  # it keeps some memory to its end
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
