"""bfloat16 cannot be interpreted (see `kernels/README.md`), but it can be compiled anywhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_all.py")
ROOT = Path(__file__).parents[2]
# Shared memory that one program may have, in bytes: A100 and H100 or H200.
SHARED_MEMORY = {80: 163 * 2**10, 90: 227 * 2**10}


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_kernel_compiles_and_fits(capability: int, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability)],
        env=environment, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {kernel for _, kernel, _ in lines} == {
        "_plan_kernel", "_decode_kernel", "_shared_kernel", "_merge_kernel", "_chunk_kernel",
        "_kv_write_kernel", "_block_copy_kernel",
        "_rms_norm_kernel", "_silu_mul_kernel", "_row_stats_kernel", "_rotary_write_kernel",
    }  # fmt: skip
    for target, kernel, shared in lines:
        assert int(target) == capability
        assert int(shared) <= SHARED_MEMORY[capability], kernel
