"""A virtual environment with links to some installed packages and their requirements."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def make_environment(folder: Path, packages: list[str]) -> Path:
    """Make an environment with these packages and their requirements; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (target,) = folder.glob("lib/python*/site-packages")
    for found in required(packages):
        installed = Path(str(found.locate_file("")))
        for name in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            # Packages may share a folder.
            if (installed / name).exists() and not (target / name).exists():
                (target / name).symlink_to(installed / name)
    return folder / "bin" / "python"


def required(packages: list[str]) -> list[Distribution]:
    """Return packages and all that they require, without extras."""
    waiting, found = list(packages), dict[str, Distribution]()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # required only on another platform
        for line in found[name].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return list(found.values())
