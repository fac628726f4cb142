"""Unpacking of block tables equals its reference."""

import pytest
import torch

from batchinfer.kernels import reference, unpack_block_tables
from tests.kernels.cases import TABLES_CASES, TablesCase, build_tables
from tests.kernels.gpu_or_interpreter import on_both


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
