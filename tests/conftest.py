"""Settings every test runs under."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Read when torch and huggingface_hub are first imported, here and in every process a test starts.
os.environ |= {
    # Models here are tiny: they only lose by sharing their work, the more so on a busy machine.
    "OMP_NUM_THREADS": "1",
    # Where a test does share it, threads that spin would take the cores from the other tests.
    "OMP_WAIT_POLICY": "passive",
    # No test reaches for a model hub.
    "HF_HUB_OFFLINE": "1",
}

# Containers often set it: each of a thousand processes would compile all that it imports of ours.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch

from batchinfer.console import phases
from batchinfer.process.process import UNUSED, gc_paused
from tests import fork_servers, interpreter

if TYPE_CHECKING:
    from batchinfer import LLM

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    settings = (
        None  # a machine with a GPU may be without it: no test under the marker `gpu` needs it
    )

try:
    from hypothesis.internal.conjecture import providers
except ImportError:
    providers = None

if not torch.cuda.is_available():
    # Read when triton is first imported, which transformers does.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if settings is not None:
    settings.register_profile(
        "repeatable",
        derandomize=True,
        deadline=None,
        max_examples=50,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("repeatable")
# Among what Hypothesis tries are the constants of whatever modules of ours are imported by then.
# Which those are depends on the tests before, so another worker would try other examples. A release
# of Hypothesis that keeps them elsewhere does so again: no test depends on it.
if hasattr(providers, "_get_local_constants") and hasattr(providers, "_local_constants"):
    _none = providers._local_constants
    providers._get_local_constants = lambda: _none


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without looking for garbage: nearly all that is imported stays."""
    with gc_paused():
        return (yield)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that writes text, called ``tiny``; tests change only copies of it."""
    from tests.models import make_text_model

    return make_text_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def llm(model: Path) -> LLM:
    """The Python API over that model; tests that change it change it back."""
    from batchinfer import LLM

    return LLM(model, num_kv_blocks=128)


@pytest.fixture(autouse=True)
def no_waits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long anything lasts is the machine's affair: lines about it come where a test asks."""
    monkeypatch.setattr(phases, "SHOWN_AFTER_S", math.inf)


@pytest.fixture(autouse=True)
def kernels_are_interpreted_fast() -> None:
    interpreter.hasten()


@pytest.fixture(autouse=True)
def nothing_waits_for_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power never fails here: what it leaves of files, `tests/faults` finds out without a disk."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@pytest.fixture(autouse=True)
def prompts_are_soon_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """But where tests are about the processes that make them: there this is a fixture of theirs."""
    fork_servers.fork_servers(monkeypatch)


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Undo what a program may do to its process, and a test may not."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    for name in [name for name in UNUSED if sys.modules.get(name, name) is None]:
        del sys.modules[name]  # a worker leaves them out of its process; here others want them
    logging.getLogger("batchinfer").setLevel(logging.NOTSET)
