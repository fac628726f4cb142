"""Linear layers with 4-bit weights match their reference; the inline PTX runs in NumPy."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from batchinfer.kernels import int4_linear as module
from batchinfer.kernels import reference
from batchinfer.kernels.int4_linear import int4_linear, num_pieces
from batchinfer.kernels.int4_words import E2M1_UNITS, Int4Words, can_pack
from batchinfer.kernels.low_bit import Int4Weight
from tests.kernels.gpu_or_interpreter import COMPILED, on_both
from tests.kernels.int4_cases import (
    BIG_INT4_CASES,
    E2M1_TABLE,
    INT4_CASES,
    Int4Case,
    build_int4,
    build_weight,
)
from tests.kernels.interpreted_dot import sum_rows_alike

ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Half of the distance from 1 to the next number of the dtype."""
MAGIC = {torch.bfloat16: 128, torch.float16: 1024}
"""What the PTX adds to integers."""
CASES = {case.name: case for case in INT4_CASES}


def check(case: Int4Case, device: str, dtype: torch.dtype) -> None:
    got = build_int4(case, device, dtype)
    expected = got["out"].double()  # not rounded
    weight = got["weight"].dequantized(torch.float64)
    total = got["x"].double().abs() @ weight.abs().T
    if case.adds:
        total += got["out"].double().abs()
    if got["bias"] is not None:
        total += got["bias"].double().abs()
    reference.int4_linear(**got | {"out": expected})
    # Products are exact in float32; a row sums `width` of them.
    sums = 2**-24 * (case.width**0.5 * 4 + 4)
    allowed = ROUNDING[dtype] * expected.abs() * 1.01 + sums * total + 2**-25
    int4_linear(**got)
    assert got["out"].isfinite().all()
    assert ((got["out"].double() - expected).abs() <= allowed).all()


@on_both()
@pytest.mark.parametrize("case", INT4_CASES, ids=str)
def test_int4_linear_equals_reference(case: Int4Case, dtype: torch.dtype, device: str) -> None:
    check(case, device, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", COMPILED, ids=str)
@pytest.mark.parametrize("case", BIG_INT4_CASES, ids=str)
def test_int4_linear_equals_reference_for_large_shapes_on_gpu(
    case: Int4Case, dtype: torch.dtype, gpu: str
) -> None:
    check(case, gpu, dtype)


def check_invariant(case: Int4Case, device: str, dtype: torch.dtype, fewer: int) -> None:
    arguments = build_int4(case, device, dtype)
    some = {"x": arguments["x"][:fewer], "out": arguments["out"][:fewer].clone()}
    int4_linear(**arguments, batch_invariant=True)
    int4_linear(**arguments | some, batch_invariant=True)
    assert torch.equal(arguments["out"][:fewer], some["out"])


def test_row_bits_do_not_depend_on_other_rows(
    interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one multiprocessor, the default number of pieces would be 2 for 3 rows, and 1 for 80."""
    sum_rows_alike(monkeypatch)
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: 1)
    case = Int4Case("rows", 80, 60, 512)
    check_invariant(case, interpreter, torch.float32, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", COMPILED, ids=str)
@pytest.mark.parametrize("fewer", [1, 33, 100])
def test_row_bits_do_not_depend_on_other_rows_on_gpu(
    fewer: int, dtype: torch.dtype, gpu: str
) -> None:
    for case in BIG_INT4_CASES[2:4]:
        check_invariant(case, gpu, dtype, fewer)


@pytest.mark.parametrize("dtype", COMPILED, ids=str)
@pytest.mark.parametrize("case", INT4_CASES, ids=str)
def test_words_dequantize_to_the_packed_weight(case: Int4Case, dtype: torch.dtype) -> None:
    weight = build_weight(case)
    words = Int4Words.packed(weight, dtype)
    # Factors are multiplied last, and rounding may differ.
    precision = 1e-6 if case.kind == "nvfp4" else 0
    torch.testing.assert_close(words.dequantized(), weight.dequantized(), rtol=precision, atol=0)
    has_16_bits = case.kind != "integers" and dtype != torch.float32
    assert words.scales.dtype == (dtype if has_16_bits else torch.float32)


def test_scales_whose_products_are_not_exact_in_16_bits_stay_in_float32() -> None:
    weight = build_weight(CASES["mxfp4"])
    for scales in (weight.scales * 1.3, weight.scales * 2.0**-20):
        changed = replace(weight, scales=scales)
        words = Int4Words.packed(changed, torch.float16)
        assert words.scales.dtype == torch.float32
        assert torch.equal(words.dequantized(), changed.dequantized())


def test_bytes_per_weight() -> None:
    def bytes_of(**shape: object) -> float:
        case = Int4Case("bytes", 1, 64, 1024, **shape)
        return Int4Words.packed(build_weight(case), torch.bfloat16).nbytes / (64 * 1024)

    assert bytes_of() == 0.5 + 5 / 128
    assert bytes_of(group_size=32) == 0.5 + 5 / 32
    assert bytes_of(group_size=1024) == 0.5 + 5 / 128
    assert bytes_of(kind="mxfp4", group_size=32) == 0.5 + 2 / 32
    assert bytes_of(kind="nvfp4", group_size=16) == 0.5 + 2 / 16 + 4 / 1024


def run(asm: str, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Run the inline PTX that converts one code of each of two words, and return its lanes."""
    registers = {"$1": first, "$2": second}

    def value(operand: str) -> np.ndarray | np.uint32:
        return registers[operand] if operand in registers else np.uint32(int(operand, 0))

    for name, to, operands in re.findall(r"^(\w+)\.b32 (\$?\w+), (.*);$", asm, re.MULTILINE):
        a, *rest = map(value, operands.split(", "))
        if name == "prmt":
            choices = [int(rest[1]) >> 4 * place & 7 for place in range(4)]
            both = np.stack([a, rest[0]], -1).view(np.uint8)
            registers[to] = np.ascontiguousarray(both[:, choices]).view(np.uint32)[:, 0]
        elif name == "lop3":
            assert rest[2] == 0xEA
            registers[to] = a & rest[0] | rest[1]
        else:
            registers[to] = {"shl": np.left_shift, "shr": np.right_shift}[name](a, rest[0])
    return registers["$0"].view(np.uint16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["integers", "mxfp4"])
def test_inline_ptx_converts_every_code(kind: str, dtype: torch.dtype) -> None:
    """A register has the numbers of two neighboring columns."""
    case = Int4Case("codes", 1, 96, 128, kind, 128)
    weight = replace(build_weight(case), scales=torch.ones(96, 1))
    words = Int4Words.packed(weight, dtype).words[0].numpy().view(np.uint32)
    pairs = words.reshape(-1, 8, 2)
    name = f"_{'BF16' if dtype == torch.bfloat16 else 'F16'}_"
    programs = getattr(module, name + ("INTEGERS" if kind == "integers" else "E2M1")).value
    for at, asm in enumerate(programs):
        lanes = run(asm, *(np.ascontiguousarray(pairs[:, :, side]).ravel() for side in (0, 1)))
        got = torch.from_numpy(lanes.view(np.int16).copy()).view(dtype).float().view(96, 16)
        codes = weight.codes[:, 16 * at : 16 * at + 16].int()
        if kind == "integers":
            assert torch.equal(got - MAGIC[dtype], codes.float())
        else:
            expected = E2M1_TABLE[codes].float() / 2
            assert torch.equal(got * E2M1_UNITS[dtype], expected)
            assert torch.equal(got.signbit(), codes >= 8)


def test_default_pieces_are_never_empty() -> None:
    x = torch.empty(0, dtype=torch.bfloat16)
    assert num_pieces(1, 1024, 24, x) > 1
    assert num_pieces(8192, 4096, 32, x) == 1
    for rows in (1, 64, 100, 256):
        for outputs in (64, 1024, 6144, 28672):
            for blocks in (1, 2, 8, 11, 24, 112):
                pieces = num_pieces(rows, outputs, blocks, x)
                assert (pieces - 1) * -(-blocks // pieces) < blocks
    assert num_pieces(1, 4096, 32, x) == num_pieces(64, 4096, 32, x)


def test_other_tables_and_groups_are_refused() -> None:
    weight = build_weight(CASES["mxfp4"])
    other = replace(weight, table=E2M1_TABLE.flip(0))
    assert can_pack(weight)
    assert not can_pack(other)
    assert not can_pack(Int4Weight.rounded(torch.ones(2, 100), 48))
    with pytest.raises(ValueError, match="4-bit integers and e2m1 numbers, in groups of 16, 32"):
        Int4Words.packed(other, torch.float16)


def test_int4_linear_refuses_wrong_shapes_and_dtypes(interpreter: str) -> None:
    arguments = build_int4(CASES["groups_of_64"], interpreter, torch.float32)
    x, out = arguments["x"], arguments["out"]
    for wrong in (x[:, 1:], x.t().contiguous().t(), x.half()):
        with pytest.raises(ValueError, match=r"expected contiguous rows of 320 in torch\.float32"):
            int4_linear(**arguments | {"x": wrong})
    with pytest.raises(ValueError, match="out is"):
        int4_linear(**arguments | {"out": out.t().contiguous().t()})
