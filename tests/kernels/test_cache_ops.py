"""Kernels that write, copy and unpack the cache and its tables match their references."""

import pytest
import torch

from batchinfer.kernels import block_copy, kv_write, reference, unpack_block_tables
from tests.kernels.cases import (
    COPY_CASES,
    TABLES_CASES,
    WRITE_CASES,
    CopyCase,
    TablesCase,
    WriteCase,
    build_copy,
    build_tables,
    build_write,
)
from tests.kernels.gpu_or_interpreter import on_both


@on_both()
@pytest.mark.parametrize("case", WRITE_CASES, ids=str)
def test_kv_write_equals_reference(case: WriteCase, dtype: torch.dtype, device: str) -> None:
    got, arguments = build_write(case, device, dtype)
    kv_write.kv_write(**arguments)
    expected, arguments = build_write(case, device, dtype)
    reference.kv_write(**arguments)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    written = int((arguments["slot_mapping"] >= 0).sum())
    assert int((~got.isnan()).sum()) == written * case.num_kv_heads * (
        case.key_width + case.value_width
    )


@on_both()
@pytest.mark.parametrize("case", COPY_CASES, ids=str)
def test_block_copy_equals_reference(case: CopyCase, dtype: torch.dtype, device: str) -> None:
    got, expected = build_copy(case, device, dtype), build_copy(case, device, dtype)
    block_copy.block_copy(**got)
    reference.block_copy(**expected)
    torch.testing.assert_close(got["pool"], expected["pool"], rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_block_copy_uses_int64_offsets_on_gpu(gpu: str) -> None:
    pool = torch.zeros(2**15 + 2, 2**16, dtype=torch.uint8, device=gpu)
    pool[-1] = 7
    pairs = torch.tensor([[2**15 + 1, 0], [2**15 + 1, 2**15]], dtype=torch.int32, device=gpu)
    block_copy.block_copy(pool, pairs)
    assert pool.any(dim=1).nonzero().flatten().tolist() == [0, 2**15, 2**15 + 1]


def test_block_copy_of_a_layer_major_pool(interpreter: str) -> None:
    pool = torch.randn(3, 5, 5000, device=interpreter)
    expected = pool.clone()
    pairs = torch.tensor([[4, 0], [2, 3]], dtype=torch.int32)
    expected[:, [0, 3]] = expected[:, [4, 2]]
    block_copy.block_copy(pool.transpose(0, 1), pairs)
    assert torch.equal(pool, expected)


def test_block_copy_refuses_elements_with_gaps(interpreter: str) -> None:
    pool = torch.zeros(4, 32, device=interpreter)[:, ::2]
    with pytest.raises(ValueError, match="contiguous"):
        block_copy.block_copy(pool, torch.zeros(1, 2, dtype=torch.int32))


@on_both([torch.int32], [torch.int32])
@pytest.mark.parametrize("case", TABLES_CASES, ids=str)
def test_unpack_block_tables_equals_reference(
    case: TablesCase, device: str, dtype: torch.dtype
) -> None:
    got, expected = build_tables(case, device), build_tables(case, device)
    unpack_block_tables.unpack_block_tables(**got)
    reference.unpack_block_tables(**expected)
    assert torch.equal(got["tables"], expected["tables"])
    assert (got["tables"] >= 0).sum() == case.groups * case.count * case.width
    assert got["tables"].dtype == dtype
