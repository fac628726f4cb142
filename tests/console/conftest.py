"""Fixtures for tests of console output."""

from __future__ import annotations

import pytest

from batchinfer.console import phases


class Clock:
    """A clock that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def phases_are_shown(monkeypatch: pytest.MonkeyPatch, no_lines_about_waits: None) -> None:
    """Show phases after the usual delay, as outside of tests."""
    monkeypatch.setattr(phases, "SHOWN_AFTER_S", 0.5)
