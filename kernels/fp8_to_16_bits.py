"""Float8 e4m3fn widened to 16 bits in registers, several numbers in an instruction.

Exact. From compute capability 8.9 on by the device's conversions, and before by operations on the
integers of four codes in a register. NaN stays NaN in `widen_cache` alone.
"""

import triton
import triton.language as tl

from batchinfer.kernels.fp8 import widen

# Triton's interpreter has no instructions of a device.
_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def widen_cache(
    stored,  # [...] as the cache holds it
    DTYPE: tl.constexpr,
    NANS: tl.constexpr,  # whether any may be NaN
):
    """`widen`, where bytes become float16 four at a time."""
    if (tl.uint8 == stored.dtype) & (tl.float16 == DTYPE) & (not _INTERPRETED):
        # A byte and its sign, moved to where float16 has its fields.
        wide = tl.inline_asm_elementwise(
            """
            {
            prmt.b32 $0, $2, 0, 0x9180;
            prmt.b32 $1, $2, 0, 0xb3a2;
            shl.b32 $0, $0, 7;
            shl.b32 $1, $1, 7;
            and.b32 $0, $0, 0xbf80bf80;
            and.b32 $1, $1, 0xbf80bf80;
            }
            """,
            "=&r,=&r,r",
            [stored],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
        if NANS:
            # 0x7F alone is one mantissa away from the highest bit of float16's exponent.
            wide = tl.inline_asm_elementwise(
                """
                {
                .reg .b32 carried;
                add.u32 carried, $1, 0x00800080;
                lop3.b32 $0, carried, 0x40004000, $1, 0xea;
                }
                """,
                "=r,r",
                [wide],
                dtype=tl.float16,
                is_pure=True,
                pack=2,
            )
        wide *= 256.0  # the exponents' biases differ by 8
    else:
        wide = widen(stored, DTYPE)
    return wide


@triton.jit
def widen_words(
    stored,  # [...] float8, or uint8 that stands for it: not NaN then
    DTYPE: tl.constexpr,  # float16 or bfloat16
):
    # Four at a time, which fill one register.
    if tl.float8e4nv == stored.dtype and tl.bfloat16 == DTYPE:
        # By way of float32: single conversions to bfloat16, which Triton 3.9 asks for, are slow.
        wide = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 half;
            .reg .b16 one, two;
            .reg .f32 first, second;
            cvt.rn.f16x2.e4m3x2 half, $1;
            mov.b32 {one, two}, half;
            cvt.f32.f16 first, one;
            cvt.f32.f16 second, two;
            cvt.rn.bf16x2.f32 $0, second, first;
            }
            """,
            "=r,h",
            [stored],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif tl.bfloat16 == DTYPE:
        # Sign, exponent and mantissa move to their bfloat16 places. A power of two corrects the
        # exponent, whose biases differ, and makes subnormal numbers normal.
        wide = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, scale, none;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            shr.b32 $0, low, 4;
            shr.b32 $1, high, 4;
            and.b32 $0, $0, 0x07f007f0;
            and.b32 $1, $1, 0x07f007f0;
            lop3.b32 $0, low, 0x80008000, $0, 0xea;
            lop3.b32 $1, high, 0x80008000, $1, 0xea;
            mov.b32 scale, 0x7b807b80;
            mov.b32 none, 0x80008000;
            fma.rn.bf16x2 $0, $0, scale, none;
            fma.rn.bf16x2 $1, $1, scale, none;
            }
            """,
            "=&r,=&r,r",
            [stored],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    elif tl.uint8 == stored.dtype:
        wide = widen_cache(stored, tl.float16, False)
    else:
        wide = stored.to(DTYPE)
    return wide
