"""How many programs run at a time, from what they were compiled to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from batchinfer.kernels.residency import Multiprocessor, programs_each, resident_programs

H100 = SimpleNamespace(
    shared_memory_per_multiprocessor=233472,
    max_threads_per_multi_processor=2048,
    multi_processor_count=132,
)


@pytest.mark.parametrize(
    ("registers", "shared_memory", "num_warps", "expected"),
    [
        (220, 72192, 4, 2),  # registers: 8 warps of 224 each
        (106, 72192, 4, 3),  # shared memory: 3 of 73,216 bytes
        (128, 37376, 4, 4),  # 16 warps of 128 registers
        (129, 37376, 4, 3),  # 12 of 136
        (255, 164864, 8, 1),
        (255, 115200, 4, 2),  # twice 116,224 bytes is all there is
        (255, 115208, 4, 2),
        (255, 115713, 4, 1),
        (16, 0, 16, 4),  # threads
        (16, 0, 1, 32),  # as many as there may be
        (255, 10**6, 16, 1),  # not that it could be launched
    ],
)
def test_the_scarcest_limits(
    registers: int, shared_memory: int, num_warps: int, expected: int
) -> None:
    has = Multiprocessor.of(H100)
    assert programs_each(has, registers, shared_memory, num_warps) == expected


def test_a_kernel_is_loaded_and_asked() -> None:
    loaded = []
    compiled = SimpleNamespace(
        _init_handles=lambda: loaded.append(True),
        n_regs=106,
        metadata=SimpleNamespace(shared=72192, num_warps=4),
    )
    assert resident_programs(compiled, H100) == 3 * 132
    assert loaded
