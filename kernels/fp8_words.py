# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803
# (A kernel's arguments are Triton's own values and mypy cannot type them: what they hold stands in
# the comment behind each. Compile-time constants are written as constants.)
"""Float8 e4m3fn widened to 16 bits in registers, several numbers in an instruction.

Exact. From compute capability 8.9 on by the device's conversions, and before by operations on the
integers of four codes in a register, where NaN does not stay NaN.
"""

import triton
import triton.language as tl


@triton.jit
def widen_words(
    stored,  # [...] float8, or uint8 that stands for it: not NaN then
    DTYPE: tl.constexpr,  # float16 or bfloat16
):
    # Four at a time, which lie in one register.
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
        # Sign, exponent and mantissa go where bfloat16 has them. A power of two mends the exponent,
        # whose biases differ; what float8 holds as subnormal becomes normal by it.
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
        wide = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, scale;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            shr.b32 $0, low, 1;
            shr.b32 $1, high, 1;
            and.b32 $0, $0, 0x3f803f80;
            and.b32 $1, $1, 0x3f803f80;
            lop3.b32 $0, low, 0x80008000, $0, 0xea;
            lop3.b32 $1, high, 0x80008000, $1, 0xea;
            mov.b32 scale, 0x5c005c00;
            mul.f16x2 $0, $0, scale;
            mul.f16x2 $1, $1, scale;
            }
            """,
            "=&r,=&r,r",
            [stored],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        wide = stored.to(DTYPE)
    return wide
