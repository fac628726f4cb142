"""Runs tasks of the GPU benchmarks, each in its own process with a time limit and a log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TASK_FILE = HERE / "gpu_one_task.py"
TRITON_CACHE = Path(
    os.environ.get("TRITON_CACHE_DIR") or Path(tempfile.gettempdir(), "batchinfer-triton-cache")
)
"""A fixed folder, because Triton's cache contains absolute paths."""
_KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Task:
    """A process of ``gpu_one_task.py``, whose log has the same name."""

    stage: str
    name: str
    arguments: tuple[str, ...]
    limit_s: float


def run_task(task: Task, folder: Path, limit_s: float, *, dry_run: bool) -> dict[str, Any]:
    """Run a task to its end or its time limit. Print its output, and store the output in a log.

    Returns:
        ``ok``, the seconds that the task took, its log and, if it failed, the error.
    """
    log = folder / "logs" / f"{task.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(TASK_FILE), task.stage, *task.arguments]
    command += ["--out", str(folder), "--seconds", f"{limit_s:.0f}"]
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--dry-run"] if dry_run else command,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=_environment(dry_run), start_new_session=True,
        )  # fmt: skip
        timer = Timer(limit_s, _kill, (process,))
        timer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                print(line, end="", flush=True)
            process.wait()
        finally:
            timer.cancel()
            _kill(process)
            process.stdout.close()
    seconds = time.monotonic() - began
    outcome = {"ok": process.returncode == 0, "seconds": seconds, "log": f"logs/{log.name}"}
    if process.returncode == _KILLED and seconds >= limit_s:
        return outcome | {"error": f"killed after {limit_s:.0f} s"}
    if process.returncode != 0:
        last = (log.read_text().strip().splitlines() or ["no output"])[-1]
        return outcome | {"error": f"exit code {process.returncode}: {last[:500]}"}
    return outcome


def has_cuda() -> bool:
    """Check for CUDA in another process, so that this process allocates no device memory."""
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _kill(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _environment(dry_run: bool) -> dict[str, str]:
    paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",  # keeps the output of a killed process
        "HF_HUB_OFFLINE": "1",
        "TRITON_CACHE_DIR": str(TRITON_CACHE),
        "TRITON_STORE_BINARY_ONLY": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    if dry_run:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment.setdefault("OMP_NUM_THREADS", "1")  # fastest for tiny shapes
    return environment
