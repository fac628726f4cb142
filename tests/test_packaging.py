"""What ``pip install .`` takes along: every folder of code, and the files beside the code."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_INSTALLED = (".md", ".schema.json")
"""For who reads the repository, and for editors."""


def files() -> Iterator[Path]:
    """All files of the package, those behind links included."""
    for folder, _, names in os.walk(ROOT / "batchinfer", followlinks=True):
        for name in names:
            if "__pycache__" not in folder:
                yield (Path(folder) / name).relative_to(ROOT)


def package_of(path: Path) -> str:
    return ".".join(path.parent.parts)


def test_every_file_is_installed() -> None:
    setuptools = pytest.importorskip("setuptools")
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = set(setuptools.find_namespace_packages(str(ROOT), **configured["packages"]["find"]))
    data = configured["package-data"]
    left_out = [
        str(path)
        for path in files()
        if package_of(path) not in packages
        or not any(fnmatch(path.name, kind) for kind in ("*.py", *data.get(package_of(path), ())))
    ]
    assert [path for path in left_out if not path.endswith(NOT_INSTALLED)] == []
