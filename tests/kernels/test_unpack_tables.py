import pytest
import torch

from batchinfer.kernels import launch, reference, unpack_tables
from tests.kernels.cases import TABLES_CASES, TablesCase, build_tables


def check(case: TablesCase, device: str) -> None:
    """The kernel leaves the tables as its twin does, what is past the packed ones too."""
    got, expected = build_tables(case, device), build_tables(case, device)
    unpack_tables.unpack_tables(**got)
    reference.unpack_tables(**expected)
    assert torch.equal(got["tables"], expected["tables"])
    assert (got["tables"] >= 0).sum() == case.groups * case.count * case.width


@pytest.mark.parametrize("case", TABLES_CASES, ids=str)
def test_equals_its_twin(case: TablesCase, interpreter: str) -> None:
    check(case, interpreter)


@pytest.mark.gpu
@pytest.mark.parametrize("case", TABLES_CASES, ids=str)
def test_equals_its_twin_on_a_gpu(case: TablesCase, gpu: str) -> None:
    check(case, gpu)


def test_refuses_the_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match="unpack_tables: tensors are on 'cpu'"):
        unpack_tables.unpack_tables(**build_tables(TABLES_CASES[0], "cpu"))
