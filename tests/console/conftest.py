"""Fixtures for what is shown."""

from __future__ import annotations

import pytest

from batchinfer.console import phases


@pytest.fixture
def waits_are_told(monkeypatch: pytest.MonkeyPatch, no_waits_are_told: None) -> None:
    """As where no test runs."""
    monkeypatch.setattr(phases, "SHOWN_AFTER_S", 0.5)
