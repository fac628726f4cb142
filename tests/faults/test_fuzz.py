"""Some of the cases of which ``make faults`` runs tens of thousands."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.job.input import parquet
from batchinfer.worker import loader
from tests.families import FAMILIES
from tests.faults import fuzz_families, fuzz_jobs, fuzz_models, fuzz_parquet
from tests.faults.fuzz import Case, run_cases

SLOW_S = 30.0
"""Far more than a case takes on a busy machine, far less than one that grows without bounds."""


@pytest.mark.parametrize("count", [100, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", [fuzz_jobs.case, fuzz_parquet.case])
def test_nothing_is_wrong_slow_or_fatal(case: Case, count: int, tmp_path: Path) -> None:
    found = run_cases(case, count, 1, tmp_path, jobs=1, most_s=SLOW_S)
    assert found.violations == []
    assert found.words.total() == count
    others = [times for word, times in found.words.items() if not word.endswith("exit 4")]
    assert sum(others) > count // 15


@pytest.mark.long
def test_broken_model_folders_are_refused_by_name(tmp_path: Path) -> None:
    found = run_cases(fuzz_models.case, 40, 1, tmp_path, jobs=1, most_s=SLOW_S)
    assert found.violations == []
    assert found.words["OK"] > 5
    assert found.words["exit 5"] > 20


@pytest.mark.long
def test_models_are_equal_to_transformers_own_or_refused(tmp_path: Path) -> None:
    found = run_cases(fuzz_families.case, len(FAMILIES), 1, tmp_path, jobs=1, most_s=SLOW_S)
    assert found.violations == []
    equal = [word for word in found.words if word.endswith(fuzz_families.EQUAL)]
    assert len(equal) >= 67


def phimoe_unchecked(number: int, seed: int, folder: Path) -> str:
    loader.check_against_eager = lambda *_, **__: None  # type: ignore[assignment]
    of_phimoe = FAMILIES.index("phimoe") + number * len(FAMILIES)
    return fuzz_families.case(of_phimoe, seed, folder)


@pytest.mark.long
def test_the_comparison_sees_a_window_that_is_left_out(tmp_path: Path) -> None:
    found = run_cases(phimoe_unchecked, 6, 1, tmp_path, jobs=1, most_s=SLOW_S)
    assert any("phimoe: logits are off by" in violation for violation in found.violations)


def open_unchecked(file: pa.NativeFile, *_: object, **__: object) -> pq.ParquetFile:
    return pq.ParquetFile(file, page_checksum_verification=False)


def unchecked(number: int, seed: int, folder: Path) -> str:
    parquet.open_parquet = open_unchecked
    return fuzz_parquet.case(number, seed, folder)


@pytest.mark.long
def test_the_check_sees_it_when_page_checksums_are_not_verified(tmp_path: Path) -> None:
    found = run_cases(unchecked, 100, 1, tmp_path, jobs=1)
    assert any("rows, wrong:" in violation for violation in found.violations)
