"""`benchmarks/images.py` passes its options to each engine, and outlives an engine that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import image_model
import images
import peers


def test_options_reach_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first engine, with which the others are compared, fails."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        name = command[command.index("--engine") + 1]
        line = json.dumps({"engine": name, "rows_per_s": 2.0})
        return subprocess.CompletedProcess(command, 0, line if name == "generate" else "", "broken")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(image_model, "make_seeing", lambda folder: folder)
    monkeypatch.setattr(peers, "python_of", lambda name, folder: "python")
    given = ["--batch", "3", "--threads", "5", "--rows", "7", "--dtype", "bfloat16"]
    own = ["--engines", "vllm", "generate", "--rounds", "1", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["images.py", *own, *given])
    images.main()
    assert len(commands) == 2
    for command in commands:
        options = dict(zip(command[2::2], command[3::2], strict=True))
        assert options.items() >= dict(zip(given[::2], given[1::2], strict=True)).items()
    assert "bfloat16 generate: 2.00 rows/s\n" in capsys.readouterr().out
