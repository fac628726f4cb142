"""First light: its time limits, what it does about failures, and the files that it leaves.

Most tests replace the tasks by a script that takes no time. Tests of the real tasks are in
`tests/test_gpu_smoke.py`, `tests/test_gpu_kernels.py` and, for all of them, the last test here.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from tests.minimal_environment import make_environment

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import first_light  # noqa: E402
import gpu  # noqa: E402
import gpu_kernels  # noqa: E402
import gpu_processes  # noqa: E402
from first_light import PACK_S, FirstLight, Stage, limit_of, stages  # noqa: E402
from gpu_outbox import (  # noqa: E402
    CACHE,
    LOGS,
    RESULTS,
    Outbox,
    complete_folders,
    pack_cache,
    unpack_cache,
)

PACKAGES = [
    *("torch", "transformers", "triton", "numpy", "safetensors", "tokenizers", "jinja2", "pytest")
]
ABSENT = ["hypothesis", "polars", "psutil", "pyarrow", "pydantic", "ruamel"]


def test_stages_run_in_the_order_of_the_whole_benchmark() -> None:
    kinds = dict.fromkeys(stage.kind for stage in stages(dry_run=False))
    assert list(kinds) == ["environment", *(stage for stage in gpu.STAGES if stage in kinds)]


def test_limits_of_all_stages_add_up_to_the_deadline() -> None:
    todo = stages(dry_run=False)
    assert sum(stage.limit_s for stage in todo) + PACK_S <= first_light.DEADLINE_S == 580
    assert [stage.name for stage in todo] == [stage.name for stage in stages(dry_run=True)]


@pytest.mark.parametrize("deadline_s", [20, 100, 400, 580, 1000])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_stages_end_before_the_deadline_whatever_share_of_their_time_they_use(
    deadline_s: float, share: float
) -> None:
    todo, used = stages(dry_run=False), 0.0
    for place in range(len(todo)):
        used += share * max(0.0, limit_of(todo, place, deadline_s - used))
    assert used <= deadline_s - PACK_S


def test_a_stage_has_its_own_limit_and_the_time_that_earlier_stages_left() -> None:
    todo = [Stage(name, "", limit, "x") for name, limit in (("a", 100), ("b", 50), ("c", 30))]
    assert limit_of(todo, 0, 180 + PACK_S) == 100
    assert limit_of(todo, 1, 80 + PACK_S) == 50
    assert limit_of(todo, 1, 150 + PACK_S) == 120  # the first took 30
    assert limit_of(todo, 1, 60 + PACK_S) == 50  # the last must make do with 10
    assert limit_of(todo, 2, 10 + PACK_S) == 10
    assert limit_of(todo, 2, PACK_S - 5) < 0


TASKS = """
import argparse, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
from gpu_results import Results
parser = argparse.ArgumentParser()
parser.add_argument("stage")
parser.add_argument("--out", type=Path)
args, _ = parser.parse_known_args()
ends = {ends!r}
number = len(list((args.out / "logs").glob("*.log"))) - 1
cells = Results(args.out)
print("task", number)
if ends[number] == "raise": raise RuntimeError("broken")
if ends[number] == "exit": os._exit(3)
if ends[number] == "kill": os.kill(os.getpid(), signal.SIGSEGV)
if ends[number] == "hang": time.sleep(600)
values = {{"ok": False, "error": "3 | 4 differ"}} if ends[number] == "cell" else {{"ok": True}}
cells.add(args.stage, str(number), values)
"""


def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: list[str],
    first_limit_s: float = 60,
    deadline_s: float = 1000,
) -> FirstLight:
    """Run the stages with tasks that end as given."""
    script = tmp_path / "task.py"
    script.write_text(TASKS.format(benchmarks=str(ROOT / "benchmarks"), ends=ends))
    monkeypatch.setattr(gpu_processes, "TASK_FILE", script)
    limits = [first_limit_s, *[60] * 6]
    todo = [
        replace(stage, limit_s=limit)
        for stage, limit in zip(stages(dry_run=True), limits, strict=True)
    ]
    light = FirstLight(tmp_path / "work", todo, deadline_s, dry_run=True)
    light.run()
    return light


ERRORS = {
    "raise": "exit code 1: RuntimeError: broken",
    "exit": "exit code 3: task",
    "kill": "exit code -11: task",
    "cell": "3 | 4 differ",
}


@pytest.mark.parametrize("first", [0, 1])
def test_a_failed_stage_is_reported_with_its_command_and_the_next_stage_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Every second stage fails, each in another way, beginning with stage ``first``."""
    ways = iter([*ERRORS])
    ends = [next(ways) if place % 2 == first else "ok" for place in range(7)]
    light = run(tmp_path, monkeypatch, ends)
    text = light.page(0)["first-light.md"]
    for report, end in zip(light.reports, ends, strict=True):
        assert report.ok == (end == "ok")
        found = f"### {report.name}\n" in text
        assert found == (not report.ok)
        if found:
            section = text.split(f"### {report.name}\n")[1].split("###")[0]
            assert ERRORS[end] in section
            assert f"first_light.py --device cpu --stages {report.name}`" in section
            assert f"logs/{report.name}.log" in section
    assert f"**{ends.count('ok')} of 7 stages are ok**; 7 have ended" in text


def test_a_hanging_stage_is_killed_at_its_limit_and_the_next_stages_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline_s = 1.2 + 6 * 60 + PACK_S
    light = run(tmp_path, monkeypatch, ["hang", *["ok"] * 6], 1.2, deadline_s)
    assert light.reports[0].error == "killed after 1 s"
    assert [report.state for report in light.reports] == ["FAILED", *["ok"] * 6]


def test_stages_for_which_no_time_is_left_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    light = run(tmp_path, monkeypatch, ["ok"] * 7, deadline_s=PACK_S)
    assert {report.state for report in light.reports} == {"not run"}
    text = light.page(3)["first-light.md"]
    assert "not run: the time was up" in text
    assert "triton-cache.tgz is full: 3 compiled kernels are not in it." in text


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "logs").mkdir(parents=True)
    (folder / RESULTS).write_text("{}")
    (folder / "logs" / "smoke.log").write_text("output")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with a kernel, a launcher, and a kernel that is still being written."""
    folder = tmp_path / "cache"
    files = {
        "kernel": ("__grp__k.json", "k.json", "k.cubin"),
        "launcher": ("launch.so",),
        "partial": ("k.cubin",),
    }
    for name, parts in files.items():
        (folder / name).mkdir(parents=True)
        for part in parts:
            (folder / name / part).write_bytes(part.encode() * 1000)
    return folder


def test_results_are_copied_while_stages_run_and_at_the_end(
    work: Path, cache: Path, tmp_path: Path
) -> None:
    asked, out = Event(), tmp_path / "out"

    def page(left_out: int) -> dict[str, str]:
        asked.set()
        return {"first-light.md": (work / RESULTS).read_text()}

    outbox = Outbox(work, out, cache=cache, page=page, every_s=0.001)
    assert asked.wait(60)
    (work / RESULTS).write_text('{"a": 1}')
    (work / "logs" / "late.log").write_text("more")
    assert outbox.close(60)
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["first-light.md", RESULTS, LOGS, CACHE]
    )
    assert (out / RESULTS).read_text() == (out / "first-light.md").read_text() == '{"a": 1}'
    with tarfile.open(out / LOGS) as logs:
        assert logs.getnames() == ["logs/late.log", "logs/smoke.log"]


def test_files_that_cannot_be_copied_are_an_error_and_the_next_attempt_may_succeed(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    outbox = Outbox(work, out, every_s=1000)
    out.rmdir()
    out.write_text("not a folder")
    assert not outbox.close(60)
    assert str(out) in outbox.error
    assert "Traceback" in capsys.readouterr().err
    out.unlink()
    assert Outbox(work, out, every_s=1000).close(60)


def test_a_copy_that_takes_too_long_is_an_error(work: Path, tmp_path: Path) -> None:
    goes_on = Event()

    def page(left_out: int) -> dict[str, str]:
        goes_on.wait(60)
        return {}

    outbox = Outbox(work, tmp_path / "out", page=page, every_s=1000)
    assert not outbox.close(0.01)
    assert "took longer" in outbox.error
    goes_on.set()


def test_only_complete_folders_of_the_cache_are_packed_and_come_back(cache: Path) -> None:
    before = {path: path.read_bytes() for path in cache.glob("[kl]*/*")}
    packed = cache.parent / CACHE
    content, left_out = pack_cache(complete_folders(cache))
    packed.write_bytes(content)
    for path in cache.rglob("*"):
        if path.is_file():
            path.unlink()
    assert (unpack_cache(packed, cache), left_out) == (2, 0)
    assert {path: path.read_bytes() for path in cache.glob("*/*")} == before


def test_the_packed_cache_keeps_the_oldest_folders_within_its_size(cache: Path) -> None:
    folders = complete_folders(cache)
    content, left_out = pack_cache(folders, most_bytes=25_000)  # the kernel has 27,000 bytes
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert [name for name in archive.getnames() if "/" not in name] == ["launcher"]
    assert left_out == 1


@pytest.mark.parametrize("damage", ["cut", "noise", "path"])
def test_a_damaged_cache_is_not_used(cache: Path, damage: str) -> None:
    packed, elsewhere = cache.parent / CACHE, cache.parent / "elsewhere"
    content = pack_cache(complete_folders(cache))[0]
    elsewhere.mkdir()
    if damage == "path":
        with tarfile.open(packed, "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("../outside"))
    else:
        packed.write_bytes(content[: len(content) // 2] if damage == "cut" else b"noise")
    with pytest.raises(ValueError, match=r"triton-cache\.tgz cannot be unpacked .* delete it"):
        unpack_cache(packed, elsewhere)
    assert not elsewhere.exists()
    assert not (cache.parent / "outside").exists()


KERNEL = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

@triton.jit
def kernel(x, N: tl.constexpr):
    tl.store(x, N)

triton.knobs.compilation.listener = lambda **event: print(event["cache_hit"])
source = triton.compiler.ASTSource(kernel, {"x": "*fp32", "N": "constexpr"}, {"N": 3})
triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""


def test_triton_finds_the_kernels_of_an_unpacked_cache(tmp_path: Path) -> None:
    script, cache, packed = tmp_path / "kernel.py", tmp_path / "cache", tmp_path / CACHE
    script.write_text(KERNEL)
    variables = {"TRITON_CACHE_DIR": str(cache), "TRITON_STORE_BINARY_ONLY": "1"}

    def compiled() -> str:
        environment = os.environ | variables
        environment.pop("TRITON_INTERPRET", None)
        return subprocess.check_output(
            [sys.executable, script], env=environment, text=True, stderr=subprocess.DEVNULL
        )

    assert compiled() == "False\n"
    packed.write_bytes(pack_cache(complete_folders(cache))[0])
    shutil.rmtree(cache)
    assert unpack_cache(packed, cache) == 1
    assert compiled() == "True\n"


@pytest.mark.long
def test_a_rehearsal_runs_all_stages_with_few_packages(tmp_path: Path) -> None:
    """The environment has the packages that `benchmarks/README.md` names; others, even those that
    these packages bring along, cannot be imported."""
    python = make_environment(tmp_path / "environment", PACKAGES)
    (packages,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    (packages / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n"
    )
    for name in ABSENT:
        assert subprocess.run(
            [python, "-c", f"import {name}"], stderr=subprocess.DEVNULL, check=False
        ).returncode
    collected = subprocess.run(
        [python, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider",
         *gpu_kernels.test_files()],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert collected.returncode == 0, collected.stdout + collected.stderr
    assert collected.stdout.count("::test_") > 500
    out = tmp_path / "out"
    done = subprocess.run(
        [python, ROOT / "benchmarks" / "first_light.py", "--device", "cpu", "--out", out,
         "--deadline", "3000"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["first-light.md", LOGS, RESULTS]
    text = (out / "first-light.md").read_text()
    assert "**7 of 7 stages are ok**" in text
    for said in ("## Speed", "Order of the KV pool: layer-major", "## Attention", "## Tests"):
        assert said in text
    cells = json.loads((out / RESULTS).read_text())
    names = {name.removesuffix(" graphs") for name in cells["bench"] if name.endswith(" graphs")}
    assert names == {"tiny", "tiny layer-major", "tiny-llama"}
    assert {f"{name} {cell}" for name in names for cell in ("start", "W1")} < cells["bench"].keys()
    assert "tiny-llama W3" in cells["bench"]
    assert cells["smoke"]["fusion and CUDA graphs"]["graphs_captured"] == 12
    assert cells["kernels"]["tests"]["passed"] > 20
