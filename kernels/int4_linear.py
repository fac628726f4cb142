"""Linear layers with 4-bit weights and 16-bit rows (W4A16): GPTQ, AWQ, MXFP4, NVFP4.

Formula, with groups g of 16 to 128 columns of an output n:

    out[t, n] = bias[n] + factors[n] sum_g scales[g, n]
                                     sum_(k in g) (codes[n, k] - zeros[g, n]) x[t, k]

Codes are converted to the dtype of x in registers, which is exact, because neither e2m1 numbers nor
differences of these integers have more than 5 significant bits. Unlike the weights of a checkpoint
that is dequantized when it is loaded, they are not rounded. A step with few rows reads about a
quarter of the bytes of 16-bit weights.

Accumulation: tensor cores sum each group from zero, 16 columns at a time. Group sums are scaled and
added in float32, in order. 16-bit scales (of MXFP4 and NVFP4) multiply the weights instead of the
sums. This is exact too, and takes fewer instructions for groups of 16 and 32. As in `fp8_linear`,
the sum is divided into pieces if there are few tiles. With `batch_invariant`, there is one piece
and one shape of tiles, so that a row's bits do not depend on the number of rows.

Sources: converting integers by putting their bits into the mantissa of a number is from Kim et al.
2022, arXiv:2211.10017; Frantar et al. 2024, arXiv:2408.11743 (Marlin), convert halves of words. The
layout of words is in `int4_words.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer.kernels.int4_words import (
    CODES,
    E2M1_MOVES,
    E2M1_UNITS,
    INTEGER_MOVES,
    WORD_BLOCK,
    WORDS,
    Int4Words,
    Moves,
)
from batchinfer.kernels.launch import (
    OPTIONS,
    check_launchable,
    compute_capability,
    num_multiprocessors,
)
from batchinfer.kernels.linear_tiles import (
    FEW_ROWS,
    GROUPED,
    even_pieces,
    place_tile,
    sum_pieces,
)

# Largest number of pipeline stages, and bytes of shared memory that they may take: first on devices
# with little shared memory (the compute capabilities below), then on other devices.
_STAGES = 5
_SHARED_MEMORY, _MORE_SHARED_MEMORY = 80 * 2**10, 120 * 2**10
_LITTLE_SHARED_MEMORY = (86, 89, 120)
_MAX_REGISTERS = 224  # of a thread; a multiprocessor has enough for eight warps


@dataclass(frozen=True)
class _Tile:
    rows: int
    outputs: int
    num_warps: int
    num_stages: int
    max_registers: int | None
    """Registers per thread; None: as many as the compiler wants."""


def int4_linear(
    x: torch.Tensor,  # [T, K], last dimension contiguous
    weight: Int4Words,  # [N, K]
    *,
    out: torch.Tensor,  # [T, N], contiguous
    bias: torch.Tensor | None = None,  # [N]
    adds: bool = False,
    pieces: int | None = None,
    batch_invariant: bool = False,
) -> None:
    """Write x times the transposed weight to `out`, or add it to `out`.

    Args:
        adds: true to add the product to `out`, rounding once.
        pieces: largest number of pieces; None: enough to keep the device busy.
        batch_invariant: true to give a row the same bits in any batch.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    tensors = weight.words, weight.scales, weight.zeros, weight.factors, weight.order
    check_launchable("int4_linear", x, out, bias, *tensors)
    num_rows, outputs, width = len(x), weight.outputs, weight.width
    if x.shape[1] != width or x.stride(1) != 1 or x.dtype != weight.dtype:
        raise ValueError(
            f"int4_linear: x is {list(x.shape)} of {x.dtype} with strides {x.stride()}; expected "
            f"contiguous rows of {width} in {weight.dtype}"
        )
    if out.shape != (num_rows, outputs) or not out.is_contiguous():
        raise ValueError(
            f"int4_linear: out is {list(out.shape)}; expected contiguous {[num_rows, outputs]}"
        )
    if num_rows == 0:
        return
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    tile = _tile(FEW_ROWS if batch_invariant else num_rows, x, compute_capability(x.device))
    tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    blocks = len(weight.words)
    if batch_invariant:
        pieces = 1
    elif pieces is None:
        pieces = num_pieces(num_rows, outputs, blocks, x)
    pieces = even_pieces(blocks, pieces)
    target = out if pieces == 1 else out.new_empty(pieces, *out.shape, dtype=torch.float32)
    _int4_linear_kernel[(tiles, pieces)](
        x,
        weight.words,
        weight.scales,
        weight.zeros,
        weight.factors,
        bias,
        target,
        x.stride(0),
        num_rows,
        triton.cdiv(blocks, pieces),
        OUTPUTS=outputs,
        WIDTH=width,
        GROUP=weight.group_size,
        BY_WORDS=x.dtype != torch.float32 and not triton.knobs.runtime.interpret,
        ADDS=adds and pieces == 1,
        IN_PIECES=pieces > 1,
        ROWS=tile.rows,
        OUTPUTS_BLOCK=tile.outputs,
        BLOCK=WORD_BLOCK,
        GROUPED=GROUPED,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.max_registers,
        **OPTIONS,
    )
    if pieces > 1:
        sum_pieces(target, bias, out, adds=adds)


def num_pieces(rows: int, outputs: int, blocks: int, x: torch.Tensor) -> int:
    """Return the default number of pieces: enough to keep the device busy."""
    tile = _tile(rows, x, compute_capability(x.device))
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    # With few rows, a program occupies only a part of a multiprocessor.
    wanted = num_multiprocessors(x.device) * (2 if rows <= FEW_ROWS else 1) // tiles
    return even_pieces(blocks, wanted)


def _tile(rows: int, x: torch.Tensor, capability: int) -> _Tile:
    warps = 8 if x.element_size() == 4 else 4  # float32 products take more registers
    if rows <= FEW_ROWS or x.element_size() == 4:
        size, outputs, num_warps = max(16, min(FEW_ROWS, triton.next_power_of_2(rows))), 64, warps
    else:
        size, outputs, num_warps = 128, 128, 8
    # Without a limit, the compiler may use 128 registers and spill others, to let more programs run
    # on a multiprocessor than its shared memory can hold.
    max_registers = _MAX_REGISTERS if size == FEW_ROWS else None
    room = _SHARED_MEMORY if capability in _LITTLE_SHARED_MEMORY else _MORE_SHARED_MEMORY
    stages = room // (WORD_BLOCK * size * x.element_size() + outputs * WORDS * 4)
    return _Tile(size, outputs, num_warps, max(2, min(_STAGES, stages)), max_registers)


def _extraction(at: int, moves: Moves, more: str) -> str:
    """Return PTX that makes a register of two 16-bit lanes from code `at` of the words $1 and $2:
    the moves' result, together with the bits `more`."""
    lines = [f"prmt.b32 halves, $1, $2, {'0x5410' if at < CODES // 2 else '0x7632'};"]
    last = more
    for number, (shift, mask) in enumerate(moves):
        source, to = "halves", "$0" if number == len(moves) - 1 else f"part{number}"
        if shift:
            source = "moved"
            lines.append(f"sh{'l' if shift > 0 else 'r'}.b32 moved, halves, {abs(shift)};")
        lines.append(f"lop3.b32 {to}, {source}, 0x{mask:04x}{mask:04x}, {last}, 0xea;")
        last = to
    return "{\n.reg .b32 halves, moved, part0, part1;\n" + "\n".join(lines) + "\n}"


def _extractions(moves: tuple[Moves, ...], more: str) -> tuple[str, ...]:
    return tuple(_extraction(at, moves[at % len(moves)], more) for at in range(CODES))


def _flat(moves: tuple[Moves, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    padded = [(*each, *[(0, 0)] * (_MOST_MOVES.value - len(each))) for each in moves]
    shifts, masks = zip(*(move for each in padded for move in each), strict=True)
    return shifts, masks


_MOST_MOVES = tl.constexpr(3)
# bfloat16 has 7 bits of mantissa, so an integer in the lowest bits of 128 is added to 128. float16
# has 10.
_BF16_INTEGERS = tl.constexpr(_extractions(INTEGER_MOVES, "0x43004300"))
_F16_INTEGERS = tl.constexpr(_extractions(INTEGER_MOVES, "0x64006400"))
_BF16_E2M1 = tl.constexpr(_extractions(E2M1_MOVES[torch.bfloat16], "0"))
_F16_E2M1 = tl.constexpr(_extractions(E2M1_MOVES[torch.float16], "0"))
_BF16_UNIT = tl.constexpr(E2M1_UNITS[torch.bfloat16])
_F16_UNIT = tl.constexpr(E2M1_UNITS[torch.float16])
# Shifts and masks of all moves, _MOST_MOVES for each of the four codes.
_BF16_SHIFTS, _BF16_MASKS = map(tl.constexpr, _flat(E2M1_MOVES[torch.bfloat16]))
_F16_SHIFTS, _F16_MASKS = map(tl.constexpr, _flat(E2M1_MOVES[torch.float16]))


@triton.jit(do_not_specialize=["num_rows", "piece_blocks"])
def _int4_linear_kernel(
    x_ptr,  # [T, K]
    words_ptr,  # [B, N, 16] int32
    scales_ptr,  # [G, N] float32, or the dtype of x
    zeros_ptr,  # [G, N] uint8, or None: codes are e2m1
    factors_ptr,  # [N] float32, or None
    bias_ptr,  # [N], or None
    out_ptr,  # [T, N]; if IN_PIECES, [P, T, N] float32
    x_stride,
    num_rows,
    piece_blocks,  # blocks per piece
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BY_WORDS: tl.constexpr,  # convert two words at a time, with PTX
    ADDS: tl.constexpr,
    IN_PIECES: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a tile
    OUTPUTS_BLOCK: tl.constexpr,  # outputs of a tile
    BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,
):
    row_tile, output_tile = place_tile(num_rows, OUTPUTS, ROWS, OUTPUTS_BLOCK, GROUPED)
    rows = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    outputs = (output_tile * OUTPUTS_BLOCK + tl.arange(0, OUTPUTS_BLOCK)).to(tl.int64)
    read_rows, read_outputs = tl.minimum(rows, num_rows - 1), tl.minimum(outputs, OUTPUTS - 1)
    depth: tl.constexpr = BLOCK // 8  # columns of a product, and words of a block
    columns = tl.arange(0, depth)
    block_groups: tl.constexpr = BLOCK // GROUP
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first = tl.program_id(1) * piece_blocks
    last = tl.minimum(first + piece_blocks, (WIDTH + BLOCK - 1) // BLOCK)
    x_ptrs = x_ptr + read_rows[:, None] * x_stride + columns[None, :] + first * BLOCK
    words_ptr += first.to(tl.int64) * OUTPUTS * depth
    words_ptrs = words_ptr + read_outputs[:, None] * depth + columns[None, :]
    scales_ptrs = scales_ptr + first * block_groups * OUTPUTS + read_outputs
    if zeros_ptr is not None:
        zeros_ptrs = zeros_ptr + first * block_groups * OUTPUTS + read_outputs
    acc = tl.zeros([OUTPUTS_BLOCK, ROWS], tl.float32)
    for block in range(first, last):
        words = tl.load(words_ptrs)
        sums = tl.zeros([OUTPUTS_BLOCK, ROWS], tl.float32)
        for at in tl.static_range(8):
            if WIDTH % BLOCK == 0:
                x = tl.load(x_ptrs + at * depth)
            else:
                in_width = columns[None, :] < WIDTH - block * BLOCK - at * depth
                x = tl.load(x_ptrs + at * depth, mask=in_width, other=0.0)
            if at * depth % GROUP == 0:
                scale = tl.load(scales_ptrs)
                scales_ptrs += OUTPUTS
                if zeros_ptr is not None:
                    zero = tl.load(zeros_ptrs)
                    zeros_ptrs += OUTPUTS
            if zeros_ptr is not None:
                weight = _integers(words, zero, at, dtype, BY_WORDS)
            else:
                weight = _e2m1(words, at, dtype, BY_WORDS)
            if scale.dtype != tl.float32:
                weight = _scaled(weight, scale, BY_WORDS)
                acc = tl.dot(weight, tl.trans(x), acc)
            else:
                sums = tl.dot(weight, tl.trans(x), sums, input_precision="ieee")
                if (at + 1) * depth % GROUP == 0:
                    acc += sums * scale[:, None]
                    sums = tl.zeros([OUTPUTS_BLOCK, ROWS], tl.float32)
        x_ptrs += BLOCK
        words_ptrs += OUTPUTS * depth
    if factors_ptr is not None:
        acc *= tl.load(factors_ptr + read_outputs)[:, None]
    acc = tl.trans(acc)
    in_range = (rows[:, None] < num_rows) & (outputs[None, :] < OUTPUTS)
    if IN_PIECES:
        out_ptr += tl.program_id(1).to(tl.int64) * num_rows * OUTPUTS
    elif bias_ptr is not None:
        acc += tl.load(bias_ptr + read_outputs).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows[:, None] * OUTPUTS + outputs[None, :]
    if ADDS:
        acc += tl.load(out_ptrs, mask=in_range, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc, mask=in_range)


@triton.jit
def _integers(
    words,  # [N, 16] int32
    zero,  # [N] uint8
    AT: tl.constexpr,  # which of the eight codes of a word
    DTYPE: tl.constexpr,
    BY_WORDS: tl.constexpr,
):  # [N, 16]: the code minus the zero point
    if BY_WORDS:
        asm: tl.constexpr = (_BF16_INTEGERS if tl.bfloat16 == DTYPE else _F16_INTEGERS)[AT]
        least: tl.constexpr = 128.0 if tl.bfloat16 == DTYPE else 1024.0
        codes = tl.inline_asm_elementwise(
            asm, "=&r,r,r", [words], dtype=DTYPE.value, is_pure=True, pack=2
        )
        minus = (-least - zero.to(tl.float32)).to(DTYPE)[:, None]
        weight = _multiply_add(codes, tl.full([1, 1], 1.0, DTYPE), minus)
    else:
        codes = (words >> (4 * AT)) & 15
        weight = (codes - zero.to(tl.int32)[:, None]).to(tl.float32).to(DTYPE)
    return weight


@triton.jit
def _e2m1(
    words,  # [N, 16] int32
    AT: tl.constexpr,  # which of the eight codes of a word
    DTYPE: tl.constexpr,
    BY_WORDS: tl.constexpr,
):  # [N, 16]
    is_f16: tl.constexpr = tl.float16 == DTYPE
    if BY_WORDS:
        asm: tl.constexpr = (_F16_E2M1 if is_f16 else _BF16_E2M1)[AT]
        unit: tl.constexpr = _F16_UNIT if is_f16 else _BF16_UNIT
        codes = tl.inline_asm_elementwise(
            asm, "=&r,r,r", [words], dtype=DTYPE.value, is_pure=True, pack=2
        )
        none = tl.full([1, 1], -0.0, DTYPE)
        weight = _multiply_add(codes, tl.full([1, 1], unit, DTYPE), none)
    else:
        shifts: tl.constexpr = _F16_SHIFTS if is_f16 else _BF16_SHIFTS
        masks: tl.constexpr = _F16_MASKS if is_f16 else _BF16_MASKS
        first: tl.constexpr = AT % 4 * _MOST_MOVES
        half = words >> (16 * (AT // 4))
        bits = tl.zeros_like(half)
        for number in tl.static_range(_MOST_MOVES):
            bits |= _moved(half, shifts[first + number], masks[first + number])
        if is_f16:
            weight = bits.to(tl.int16).to(tl.float16, bitcast=True) * _F16_UNIT
        else:
            weight = ((bits << 16).to(tl.float32, bitcast=True) * _BF16_UNIT).to(DTYPE)
    return weight


@triton.jit
def _moved(half, SHIFT: tl.constexpr, MASK: tl.constexpr):
    return (half << SHIFT if SHIFT >= 0 else half >> -SHIFT) & MASK


@triton.jit
def _scaled(weight, scale, BY_WORDS: tl.constexpr):
    if BY_WORDS:
        none = tl.full([1, 1], -0.0, weight.dtype)
        weight = _multiply_add(weight, scale[:, None], none)
    else:
        weight *= scale[:, None]
    return weight


@triton.jit
def _multiply_add(a, b, c):
    # Two numbers per instruction. An A100 multiplies bfloat16 pairs only with an addition.
    name: tl.constexpr = "bf16x2" if tl.bfloat16 == a.dtype else "f16x2"
    return tl.inline_asm_elementwise(
        "fma.rn." + name + " $0, $1, $2, $3;",
        "=r,r,r,r",
        [a, b, c],
        dtype=a.dtype,
        is_pure=True,
        pack=2,
    )
