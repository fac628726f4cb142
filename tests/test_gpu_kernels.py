"""The GPU tests of `make gpu` and first light: their order, and what happens to broken ones."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_kernels import Share, outcomes, run_shares  # noqa: E402
from gpu_pytest import rank  # noqa: E402

FILE = """
import os, time
import pytest

def test_passes(): pass
def test_skips(): pytest.skip("no device")
def test_fails(): assert 1 == 2
def test_crashes(): os._exit(1)
def test_hangs(): time.sleep(600)
def test_breaks_the_device():
    globals()["broken"] = True
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_passes_in_the_other_process(): pass
def test_passes_after_them(): assert "broken" not in globals()
"""
CONFTEST = """
import gpu_pytest
gpu_pytest.LIMIT_S = 0.5
"""


def make_shares(folder: Path, count: int, content: str = FILE) -> list[Share]:
    (folder / "test_them.py").write_text(content)
    (folder / "conftest.py").write_text(CONFTEST)
    logs = folder / "logs"
    logs.mkdir()
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "gpu_pytest", "-p", "no:cacheprovider"),
        *("--rootdir", str(folder), "-c", str(folder / "none.ini"), str(folder / "test_them.py")),
    ]
    (folder / "none.ini").write_text("[pytest]\n")
    return [Share(command, logs, place, count) for place in range(count)]


@pytest.fixture
def with_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))


@pytest.mark.usefixtures("with_plugin")
def test_tests_run_although_others_fail_crash_hang_or_break_the_device(tmp_path: Path) -> None:
    found = run_shares(make_shares(tmp_path, 2), time.monotonic() + 120, brief=True)
    assert (found["tests"], found["passed"], found["skipped"]) == (8, 3, 1)
    assert found["not_run"] == []
    assert not found["ok"]
    errors = {test.split("::test_")[1]: error for test, error in found["failed"].items()}
    assert set(errors) == {"fails", "crashes", "hangs", "breaks_the_device"}
    assert "assert 1 == 2" in errors["fails"]
    assert "illegal memory access" in errors["breaks_the_device"]
    assert errors["crashes"] == errors["hangs"] == "crashed, or took longer than 60 s"
    log = "".join(path.read_text() for path in (tmp_path / "logs").glob("*.log"))
    assert "in test_hangs" in log  # the traceback of the hanging test


@pytest.mark.usefixtures("with_plugin")
@pytest.mark.parametrize("brief", [False, True])
def test_a_test_that_still_runs_when_the_time_is_up_has_not_failed(
    tmp_path: Path, brief: bool
) -> None:
    content = (
        "import time\n"
        "def test_a(): pass\n"
        f"def test_b():\n    open({str(tmp_path / 'b')!r}, 'w')\n    time.sleep(600)\n"
    )
    shares = make_shares(tmp_path, 1, content)
    while not (tmp_path / "b").exists():
        assert shares[0].goes_on()
    found = run_shares(shares, time.monotonic(), brief=brief)
    assert (found["passed"], found["failed"], len(found["not_run"])) == (1, {}, 1)
    assert found["ok"] == brief


@pytest.mark.usefixtures("with_plugin")
def test_a_process_that_does_nothing_is_not_started_again(tmp_path: Path) -> None:
    shares = make_shares(tmp_path, 1, "import a_module_that_is_missing")
    found = run_shares(shares, time.monotonic() + 120, brief=True)
    assert not found["ok"]
    assert found["tests"] == 0


def test_nothing_is_ok_if_no_test_passed() -> None:
    assert not outcomes([])["ok"]
    skipped = [{"collected": ["a"]}, {"started": "a"},
               {"ended": "a", "outcome": "skipped", "seconds": 0.1, "error": ""}]  # fmt: skip
    assert not outcomes(skipped)["ok"]


def test_tests_of_the_worker_come_first_then_bfloat16_with_heads_of_128_elements() -> None:
    tests = [
        "tests/worker/test_kv_cache.py::test_swapped_block[cuda]",
        "tests/kernels/test_paged_attention.py::test_x[heads_8_8_width_128_128-gpu-torch.bfloat16]",
        "tests/kernels/test_shared_attention.py::test_shared_short_pieces[pair]",
        "tests/kernels/test_row_ops.py::test_rms_norm[wide-gpu-torch.bfloat16]",
        "tests/kernels/test_paged_attention.py::test_x[heads_8_8_width_128_128-gpu-torch.float32]",
    ]
    assert [rank(test) for test in tests] == [0, 1, 2, 2, 3]
