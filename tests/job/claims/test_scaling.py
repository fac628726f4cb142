"""Compares the time of workers that claim parts with the ideal time, on a simulated clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.job.claims.worker_queue import is_too_slow
from tests.scripts import load_script

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "fleet.py"


@pytest.mark.parametrize(
    ("num_workers", "rows_per_part", "share"), [(1, 4096, 0.99), (8, 4096, 0.95), (32, 128, 0.90)]
)
def test_claims_with_a_slow_worker_come_near_the_ideal_time(
    num_workers: int, rows_per_part: int, share: float
) -> None:
    fleet = load_script(SCRIPT)
    assert fleet.share_of_ideal(num_workers, 200_000, rows_per_part) >= share


def test_claims_with_a_ten_times_slower_worker_cost_little() -> None:
    assert load_script(SCRIPT).share_of_ideal(4, 50_000, 512, slowness=10.0) >= 1 / 1.3


def test_slow_worker_leaves_the_last_parts_to_the_others() -> None:
    assert is_too_slow(100, 300, 1.0, [10.0, 10.0])
    assert not is_too_slow(100, 30_000, 1.0, [10.0, 10.0]), "the others have enough parts"
    assert not is_too_slow(100, 100, 10.0, [10.0] * 7), "no other worker makes one part faster"
    assert not is_too_slow(100, 100, 0.0, [10.0])
    assert not is_too_slow(100, 100, 1.0, [0.0]), "the speed of the others is unknown"
