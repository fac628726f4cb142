from __future__ import annotations

import pytest

from tests.job.fakes import FakeBuild


@pytest.fixture
def build() -> FakeBuild:
    return FakeBuild()
