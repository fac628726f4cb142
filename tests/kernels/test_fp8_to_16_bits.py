"""Conversion of float8 to 16 bits; the inline PTX, which Triton cannot interpret, runs in NumPy."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from batchinfer.kernels.fp8 import FP8
from batchinfer.kernels.fp8_to_16_bits import widen_cache
from tests.kernels.gpu_or_interpreter import on_both_devices

Words = np.ndarray


def instructions() -> list[list[list[str]]]:
    """Parse the PTX blocks of `widen_cache` into names and operands of instructions."""
    pieces = re.findall(r'"""\s*\{(.*?)\}\s*"""', inspect.getsource(widen_cache.fn), re.DOTALL)
    parsed = [re.findall(r"^\s*(\w+)\.\w+ (.*);$", piece, re.MULTILINE) for piece in pieces]
    return [[[name, *operands.split(", ")] for name, operands in piece] for piece in parsed]


def permuted(word: Words, selector: int) -> Words:
    """Emulate PTX's `prmt` of a word and 0, which selects bytes or copies of their sign bits."""
    out = np.zeros_like(word)
    for place in range(4):
        choice = selector >> (4 * place) & 15
        byte = word >> np.uint32(8 * (choice & 7)) & np.uint32(255)
        if choice & 8:
            byte = np.where(byte >= 128, 255, 0).astype(np.uint32)
        out |= byte << np.uint32(8 * place)
    return out


def run(piece: list[list[str]], registers: dict[str, Words]) -> None:
    """Run instructions on registers."""
    for name, to, *operands in piece:
        a, *rest = (registers[o] if o in registers else np.uint32(int(o, 0)) for o in operands)
        if name == "prmt":
            assert rest[0] == 0
            registers[to] = permuted(a, int(rest[1]))
        elif name == "lop3":
            assert rest[2] == 0xEA
            registers[to] = a & rest[0] | rest[1]
        else:
            do = {"shl": np.left_shift, "and": np.bitwise_and, "add": np.add}[name]
            registers[to] = do(a, rest[0])


@pytest.mark.parametrize("nans", [False, True])
def test_inline_ptx_converts_every_float8_code(nans: bool) -> None:
    convert, restore_nan = instructions()
    codes = np.random.default_rng(0).permutation(np.arange(2**10) % 256).astype(np.uint8)
    if not nans:
        codes[(codes & 0x7F) == 0x7F] = 0
    registers = {"$2": codes.view(np.uint32)}
    run(convert, registers)
    pairs = [registers["$0"], registers["$1"]]
    if nans:
        for at, pair in enumerate(pairs):
            registers = {"$1": pair}
            run(restore_nan, registers)
            pairs[at] = registers["$0"]
    wide = torch.from_numpy(np.stack(pairs, 1).ravel().view(np.float16)) * 256
    expected = torch.from_numpy(codes).view(FP8).to(torch.float16)
    torch.testing.assert_close(wide, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(wide.signbit(), expected.signbit())


@triton.jit
def _widen(codes_ptr, wide_ptr, SIZE: tl.constexpr):  # noqa: N803
    places = tl.arange(0, SIZE)
    tl.store(wide_ptr + places, widen_cache(tl.load(codes_ptr + places), tl.float16, True))


@on_both_devices
def test_widen_cache_converts_every_float8_code(device: str) -> None:
    codes = (torch.arange(1024, device=device) % 256).to(torch.uint8)
    wide = torch.empty(1024, dtype=torch.float16, device=device)
    _widen[(1,)](codes, wide, SIZE=1024)
    expected = codes.view(FP8).to(torch.float16)
    torch.testing.assert_close(wide, expected, rtol=0, atol=0, equal_nan=True)
