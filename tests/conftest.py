"""Settings and fixtures of all tests."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# torch and huggingface_hub read these variables on import, here and in child processes.
os.environ |= {
    # Tiny models are slower on several threads, even more so on a busy machine.
    "OMP_NUM_THREADS": "1",
    # If a test uses several threads, spinning would take the cores from other tests.
    "OMP_WAIT_POLICY": "passive",
    # No test may access a model hub.
    "HF_HUB_OFFLINE": "1",
}

# Containers often set this variable, and then every child process compiles all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch

from batchinfer.console import phases
from batchinfer.process.process import SIGNALS, UNUSED, gc_paused
from tests import fork_servers, interpreter

if TYPE_CHECKING:
    from batchinfer import LLM

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    settings = None  # tests with the marker `gpu` also run without Hypothesis

try:
    from hypothesis.internal.conjecture import providers
except ImportError:
    providers = None

if not torch.cuda.is_available():
    # Triton reads this variable on import, and transformers imports Triton.
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
# Hypothesis also tries constants from the modules of the package that are already imported. Which
# modules these are depends on the tests that ran before, so each pytest worker would try different
# examples. This patch turns that off. If a release of Hypothesis moves these functions, the patch
# has no effect, and tests still pass.
if hasattr(providers, "_get_local_constants") and hasattr(providers, "_local_constants"):
    _none = providers._local_constants
    providers._get_local_constants = lambda: _none


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without garbage collection, because nearly all imported objects stay."""
    with gc_paused():
        return (yield)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny random model that generates text; tests change only copies of it."""
    from tests.models import make_text_model

    return make_text_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def llm(model: Path) -> LLM:
    """Return an LLM that has loaded ``model``; tests must undo their changes to it."""
    from batchinfer import LLM

    return LLM(model, num_kv_blocks=128)


@pytest.fixture(autouse=True)
def no_lines_about_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print no lines about waits, which depend on the machine's speed; tests may enable them."""
    monkeypatch.setattr(phases, "SHOWN_AFTER_S", math.inf)


@pytest.fixture(autouse=True)
def triton_interpreter_is_fast() -> None:
    interpreter.speed_up()


@pytest.fixture(autouse=True)
def fsync_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fsync do nothing, to save time: `tests/faults` simulates power failures in memory."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@pytest.fixture(autouse=True)
def text_processes_start_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork text processes from a warm process; tests of these processes replace this fixture."""
    fork_servers.fork_servers(monkeypatch)


@pytest.fixture(autouse=True)
def process_state_is_restored() -> Iterator[None]:
    """Restore signal handlers, imports and logging, which a test of the program may change."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    for name in [name for name in UNUSED if sys.modules.get(name, name) is None]:
        del sys.modules[name]  # text processes block these imports, but other tests need them
    logging.getLogger("batchinfer").setLevel(logging.NOTSET)
