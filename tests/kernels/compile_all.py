"""Compile every kernel in bfloat16 for the CUDA targets, on a machine that has no GPU.

Run by `test_compile.py`, as a process of its own: Triton cannot interpret and compile in the same
one. The launches run up to the point where a device would be needed; each prints a line.
"""

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from batchinfer.kernels import fp8, launch
from batchinfer.kernels.block_copy import block_copy
from batchinfer.kernels.kv_write import kv_write
from batchinfer.kernels.paged_attention import paged_attention
from batchinfer.kernels.rms_norm import rms_norm
from batchinfer.kernels.rotary_write import rotary_write
from batchinfer.kernels.row_stats import row_stats
from batchinfer.kernels.silu_mul import silu_mul
from tests.kernels.cases import (
    COPY_CASES,
    WRITE_CASES,
    AttentionCase,
    build_attention,
    build_copy,
    build_write,
)
from tests.kernels.row_cases import (
    ROTARY_CASES,
    ROW_CASES,
    build_rms_norm,
    build_rotary_write,
    build_row_stats,
    build_silu_mul,
)
from tests.kernels.shared_cases import INTERPRETED_SHARED_CASES, SharedCase, build_shared

LENS = ((1, 100), (5, 90))
CASES = (
    AttentionCase("plain", LENS, 16, 8, 128, num_splits=4),
    AttentionCase(
        "everything", LENS, 8, 1, 80, 40, sliding_window=50, softcap=3.0, sinks=True, num_splits=4
    ),
    AttentionCase("wide", LENS, 4, 4, 256, num_splits=1),
)
SHARED = SharedCase(
    AttentionCase("shared", ((1, 700), (1, 700)), 16, 8, 128, sinks=True), (0, 1), (0, 512)
)


class NoDevice:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device: another number for another target.
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_fp8(dtype: torch.dtype) -> None:
    """Once more what touches the cache, with one of float8."""
    for attention in CASES:
        paged_attention(**build_attention(attention, "cpu", dtype, fp8.FP8).arguments)
    paged_attention(**build_shared(SHARED, "cpu", dtype, fp8.FP8).arguments)
    kv_write(**build_write(WRITE_CASES[1], "cpu", dtype, fp8.FP8)[1])
    rotary_write(**build_rotary_write(ROTARY_CASES[2], "cpu", dtype, fp8.FP8)[1])
    block_copy(**build_copy(COPY_CASES[1], "cpu", fp8.FP8))


def compile_all() -> None:
    """Call every wrapper; its launches compile, for the driver that is active."""
    for attention in CASES:
        paged_attention(**build_attention(attention, "cpu", torch.bfloat16).arguments)
    for shared in (*INTERPRETED_SHARED_CASES[2:6], SHARED):
        paged_attention(**build_shared(shared, "cpu", torch.bfloat16).arguments)
    kv_write(**build_write(WRITE_CASES[1], "cpu", torch.bfloat16)[1])
    block_copy(**build_copy(COPY_CASES[1], "cpu", torch.bfloat16))
    rms_norm(**build_rms_norm(ROW_CASES[2], "cpu", torch.bfloat16))
    silu_mul(**build_silu_mul(ROW_CASES[2], "cpu", torch.bfloat16))
    row_stats(**build_row_stats(2, 150_000, "cpu", torch.bfloat16))
    for case in ROTARY_CASES[1:3]:
        rotary_write(**build_rotary_write(case, "cpu", torch.bfloat16)[1])


def main() -> None:
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        print(driver.active.get_current_device(), self.fn.__name__, kernel.metadata.shared)

    JITFunction.run = compile_only
    launch.INTERPRETED = True  # lets CPU tensors through; their pointers are never followed
    for capability in map(int, sys.argv[1:]):
        driver.set_active(NoDevice(capability))
        fp8.converts_fp8 = lambda device, found=capability >= 89: found
        compile_all()
        compile_fp8(torch.bfloat16)


if __name__ == "__main__":
    main()
