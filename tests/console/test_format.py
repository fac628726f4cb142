"""Values in messages: durations, sizes and shares in suitable units."""

from __future__ import annotations

import pytest

from batchinfer.console.format import duration, size, whole_percent


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0.0 s"),
        (0.00042, "0.4 ms"),
        (0.031, "31 ms"),
        (0.0996, "0.1 s"),
        (59.9, "59.9 s"),
        (75.0, "1 min 15 s"),
        (7500.0, "2 h 05 min"),
    ],
)
def test_duration_has_the_unit_that_fits(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 bytes"),
        (97_075, "94.8 KiB"),
        (768 << 20, "768 MiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_size_has_the_unit_that_fits(count: int, shown: str) -> None:
    assert size(count) == shown


@pytest.mark.parametrize(("share", "shown"), [(0.0, "0%"), (0.9999, "99%"), (1.0, "100%")])
def test_whole_percent_rounds_down(share: float, shown: str) -> None:
    assert whole_percent(share) == shown
