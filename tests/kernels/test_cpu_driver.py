"""GEMMs, attention and encoder layers in a C program (``cpu_driver.c``), on this processor and on
an emulated Arm processor."""

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
_BUILDS = {
    "all": (),
    "tiles": ("-DEMULATE_TILES",),
    "avx_vnni": ("-mno-amx-tile", "-mno-avx512f"),
    # Compiling it with -O2 takes far longer.
    "sanitized": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
_ARM = {
    "neon": ("-march=armv8-a", "cortex-a57", "NEON"),
    "neon_bf16": ("-march=armv8.6-a", "max", "NEON BF16"),
}
# Hashes of results on an emulator of AMX (Bochs, Sapphire Rapids)
_PRODUCT_BY_AMX = "product bf16 df64cfa1c3df5115 AMX"
_ATTENTION_BY_AMX = "attention bf16 3e7ee88e25d42624 AMX"
# Compilers may sum attention weights in different orders. `_ATTENTION_BY_AMX` is for the order that
# gives this hash.
_ATTENTION_IN_THAT_ORDER = "attention f32 6b4c7bf3638cb261 AVX-512"
# The same on all processors
_LOW_BIT_HASHES = {
    "product int8 f32 eec8962f27e7848d",
    "product int8 bf16 0246a73641ca2c98",
    "product int4 f32 05f570b077ebb601",
    "product int4 bf16 fa3b5f53884272b9",
    "product int8-groups f32 445c50c115004dfd",
    "product int8-groups bf16 b385bc2c49fbfa9c",
}


def run_driver(folder: Path, compiler: str, *flags: str, emulator: tuple[str, ...] = ()) -> str:
    """Build the program, run it and return its output; skip the test if a tool is missing."""
    for tool in (compiler, *emulator[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    kernels, program = Path(compiled_library.__file__).parent, folder / "driver"
    sources = [Path(__file__).with_name("cpu_driver.c"), *(kernels / name for name in _SOURCES)]
    shared = [flag for flag in compiled_library.FLAGS if flag not in _PER_BUILD]
    command = [compiler, "-O2", *shared, *flags, f"-I{kernels}", *map(str, sources)]
    built = subprocess.run([*command, "-o", str(program), "-lm"], capture_output=True, text=True)
    if any(words in built.stderr for words in _NOT_KNOWN):
        pytest.skip(f"{compiler} does not support {' '.join(flags)}")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run(
        [*emulator, str(program)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.skipif(compiled_library.load() is None, reason="no C compiler here")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags, id=name, marks=[] if name == "all" else [pytest.mark.long])
        for name, flags in _BUILDS.items()
    ],
)
def test_driver_on_this_processor(flags: tuple[str, ...], tmp_path: Path) -> None:
    compiler = os.environ.get("CC", "cc")
    output = run_driver(tmp_path, compiler, *compiled_library.for_this_processor(), *flags)
    assert low_bit_products(output) == _LOW_BIT_HASHES
    lines = output.splitlines()
    by_amx = [line for line in lines if " bf16 " in line and line.endswith(" AMX")]
    products = [line for line in by_amx if line.startswith("product bf16")]
    assert products == [_PRODUCT_BY_AMX] or (not products and flags != _BUILDS["tiles"])
    attention = [line for line in by_amx if line.startswith("attention")]
    assert len(attention) == len(products)
    if attention and _ATTENTION_IN_THAT_ORDER in lines:
        assert attention == [_ATTENTION_BY_AMX]


@pytest.mark.long
@pytest.mark.parametrize(("flag", "processor", "name"), _ARM.values(), ids=_ARM.keys())
def test_driver_on_emulated_arm(flag: str, processor: str, name: str, tmp_path: Path) -> None:
    emulator = ("qemu-aarch64", "-cpu", processor)
    output = run_driver(tmp_path, "aarch64-linux-gnu-gcc", flag, "-static", emulator=emulator)
    assert any(
        line.startswith("product bf16") and line.endswith(f" {name}")
        for line in output.splitlines()
    )
    assert low_bit_products(output) == _LOW_BIT_HASHES


def low_bit_products(output: str) -> set[str]:
    return {" ".join(x.split()[:4]) for x in output.splitlines() if x.startswith("product int")}
