"""Settings every test runs under."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Read when triton is first imported, which transformers does.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Models here are tiny: they only lose by sharing their work, the more so on a busy machine.
torch.set_num_threads(1)

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reaches for a model hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
