"""Products, attention and encoder layers in a program without Python: here, and on an emulated Arm
processor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchinfer.kernels.cpu import compiled_library
from tests.kernels.cpu_driver import run_driver

_BUILDS = {
    "all": (),
    "tiles": ("-DEMULATE_TILES",),
    "avx_vnni": ("-mno-amx-tile", "-mno-avx512f"),
    "sanitised": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
_ARM = {
    "neon": ("-march=armv8-a", "cortex-a57", "NEON"),
    "neon_bf16": ("-march=armv8.6-a", "max", "NEON BF16"),
}
# What an emulator of AMX made of the same products and attention (Bochs, Sapphire Rapids).
_PRODUCT_BY_AMX = "product bf16 df64cfa1c3df5115 AMX"
_ATTENTION_BY_AMX = "attention bf16 3e7ee88e25d42624 AMX"
# Attention adds up weights in an order that the compiler chooses; there it was this one.
_ATTENTION_IN_THAT_ORDER = "attention f32 6b4c7bf3638cb261 AVX-512"
# The same on all processors.
_OF_LOW_BIT = {
    "product int8 f32 eec8962f27e7848d",
    "product int8 bf16 0246a73641ca2c98",
    "product int4 f32 5f4fc77f4c99e4f5",
    "product int4 bf16 0fc1641188a1c19f",
    "product int8-groups f32 f7a1c61fa654bdd6",
    "product int8-groups bf16 8f4db4082b9461d7",
}


@pytest.mark.skipif(compiled_library.load() is None, reason="no C compiler here")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags, id=name, marks=[] if name == "all" else [pytest.mark.long])
        for name, flags in _BUILDS.items()
    ],
)
def test_on_this_processor(flags: tuple[str, ...], tmp_path: Path) -> None:
    compiler = os.environ.get("CC", "cc")
    said = run_driver(tmp_path, compiler, *compiled_library.for_this_processor(), *flags)
    assert low_bit_products(said) == _OF_LOW_BIT
    lines = said.splitlines()
    by_amx = [line for line in lines if " bf16 " in line and line.endswith(" AMX")]
    products = [line for line in by_amx if line.startswith("product bf16")]
    assert products == [_PRODUCT_BY_AMX] or (not products and flags != _BUILDS["tiles"])
    attention = [line for line in by_amx if line.startswith("attention")]
    assert len(attention) == len(products)
    if attention and _ATTENTION_IN_THAT_ORDER in lines:
        assert attention == [_ATTENTION_BY_AMX]


@pytest.mark.long
@pytest.mark.parametrize(("flag", "processor", "name"), _ARM.values(), ids=_ARM.keys())
def test_on_arm(flag: str, processor: str, name: str, tmp_path: Path) -> None:
    emulator = ("qemu-aarch64", "-cpu", processor)
    said = run_driver(tmp_path, "aarch64-linux-gnu-gcc", flag, "-static", emulator=emulator)
    assert any(
        line.startswith("product bf16") and line.endswith(f" {name}") for line in said.splitlines()
    )
    assert low_bit_products(said) == _OF_LOW_BIT


def low_bit_products(said: str) -> set[str]:
    return {" ".join(x.split()[:4]) for x in said.splitlines() if x.startswith("product int")}
