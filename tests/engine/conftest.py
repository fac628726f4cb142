from __future__ import annotations

import functools

import pytest

from tests.engine import fake


@pytest.fixture(scope="module", params=[False, True], ids=["one_at_a_time", "one_ahead"])
def make_engine(request: pytest.FixtureRequest) -> fake.MakeEngine:
    """Return ``fake.make_engine``, once without and once with steps submitted ahead."""
    return functools.partial(fake.make_engine, runs_ahead=request.param)
