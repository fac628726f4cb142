"""A few of the cases that ``make faults`` runs by the tens of thousands."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.job.input import parquet
from batchinfer.worker import loader
from batchinfer.worker.kv_cache import KVCache
from tests.families import FAMILIES
from tests.faults import fuzz_families, fuzz_jobs, fuzz_models, fuzz_parquet, fuzz_recurrent
from tests.faults.fuzz import Case, run_cases
from tests.models import RECURRENT_FAMILIES

SLOW_S = 30.0
"""Far more seconds than a case takes on a busy machine; longer cases count as endless."""


@pytest.mark.parametrize("count", [100, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", [fuzz_jobs.case, fuzz_parquet.case])
def test_no_case_breaks_a_promise(case: Case, count: int, tmp_path: Path) -> None:
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
def test_models_equal_transformers_or_are_refused(tmp_path: Path) -> None:
    found = run_cases(fuzz_families.case, len(FAMILIES), 1, tmp_path, jobs=1, most_s=SLOW_S)
    assert found.violations == []
    equal = [word for word in found.words if word.endswith(fuzz_families.EQUAL)]
    assert len(equal) >= 67


@pytest.mark.long
def test_recurrent_models_choose_the_tokens_of_transformers(tmp_path: Path) -> None:
    count = len(RECURRENT_FAMILIES)
    found = run_cases(fuzz_recurrent.case, count, 1, tmp_path, 1, fuzz_recurrent.MOST_S)
    assert found.violations == []
    assert found.words.total() == count


def without_copies(number: int, seed: int, folder: Path) -> str:
    KVCache.copy_blocks = lambda *_: None  # type: ignore[method-assign]
    of_lfm2 = RECURRENT_FAMILIES.index("lfm2") + number * len(RECURRENT_FAMILIES)
    return fuzz_recurrent.case(of_lfm2, seed, folder)


@pytest.mark.long
def test_the_comparison_sees_states_that_are_not_copied(tmp_path: Path) -> None:
    found = run_cases(without_copies, 2, 1, tmp_path, 1, fuzz_recurrent.MOST_S)
    assert any("rows failed: {'nan_logits'}" in violation for violation in found.violations)


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
