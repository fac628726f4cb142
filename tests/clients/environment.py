"""Creates the virtual environment of the clients when it is first needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPTIONAL = ("evalplus", "distilabel")
"""Clients that are skipped if they cannot be installed."""


def python_of_clients(folder: Path) -> Path:
    """Return the environment's Python. torch is pinned, because a newer one brings CUDA."""
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    print(f"creating {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, "torch"], check=True)
    subprocess.run([*pip, "--editable", f"{ROOT}[structured]", "lm-eval[hf]"], check=True)
    for name in OPTIONAL:
        if subprocess.run([*pip, name], check=False).returncode:
            print(f"{name} cannot be installed here", flush=True)
    (folder / "ready").touch()
    return python


def has(python: Path, package: str) -> bool:
    """Return True if the environment has a package."""
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0
