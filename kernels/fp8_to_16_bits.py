"""Converts float8 e4m3fn to 16 bits in registers, several numbers per instruction.

The conversion is exact. From compute capability 8.9 on, hardware instructions convert. On earlier
devices, integer operations convert the four codes in a register at once. Only `widen_cache`
preserves NaN.
"""

import triton
import triton.language as tl

from batchinfer.kernels.fp8 import widen

# True if Triton's interpreter runs the kernels. The interpreter cannot run inline assembly.
_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def widen_cache(
    stored,  # [...] in the cache's dtype
    DTYPE: tl.constexpr,
    NANS: tl.constexpr,  # true if numbers may be NaN
):
    """Convert like `widen`, but convert bytes to float16 four at a time."""
    if (tl.uint8 == stored.dtype) & (tl.float16 == DTYPE) & (not _INTERPRETED):
        # Move each byte's sign, exponent and mantissa to the float16 fields.
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
            # Adding one unit to the mantissa carries into the highest exponent bit only for 0x7F
            # (NaN).
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
        wide *= 256.0  # 2^8, because the exponents' biases differ by 8
    else:
        wide = widen(stored, DTYPE)
    return wide


@triton.jit
def widen_words(
    stored,  # [...] float8, or float8 viewed as uint8; never NaN
    DTYPE: tl.constexpr,  # float16 or bfloat16
):
    """Convert float8 to 16 bits, several numbers at a time."""
    if tl.float8e4nv == stored.dtype and tl.bfloat16 == DTYPE:
        # Convert through float32. Triton 3.9 would convert numbers to bfloat16 one by one, which is
        # slow.
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
        # Move sign, exponent and mantissa to the bfloat16 fields. Multiplying by a power of two
        # corrects the exponent's bias and makes subnormal numbers normal.
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
