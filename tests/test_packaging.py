"""Packages and Docker images contain all code, and the files next to the code."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_INSTALLED = (".md", ".schema.json")
"""Files for readers of the repository and for editors."""


def files() -> Iterator[Path]:
    """Yield all files of the package, including files behind links."""
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


parser = pytest.importorskip("dockerfile_parse")
IMAGES = ("cuda", "cpu")

Instruction = tuple[str, str]


def stages() -> dict[str, list[Instruction]]:
    """Return the instructions of each stage, keyed by the stage's name."""
    found: dict[str, list[Instruction]] = {}
    name = ""
    for line in parser.DockerfileParser(path=str(ROOT / "Dockerfile")).structure:
        instruction, value = line["instruction"], line["value"]
        if instruction == "FROM":
            name = value.split(" AS ")[1]
        if name and instruction != "COMMENT":
            found.setdefault(name, []).append((instruction, value))
    return found


def values(stage: str, instruction: str) -> list[str]:
    return [value for name, value in stages()[stage] if name == instruction]


def test_docker_stages_start_from_images_or_earlier_stages() -> None:
    before: list[str] = []
    for name in stages():
        [value] = values(name, "FROM")
        source = value.split(" AS ")[0]
        assert source in before or source == "python:${PYTHON}-slim"
        before.append(name)


@pytest.mark.parametrize("image", IMAGES)
def test_docker_image_runs_without_root(image: str) -> None:
    instructions = [name for name, _ in stages()[image]]
    assert values(image, "USER") == ["batchinfer"]
    assert instructions.index("USER") > max(
        at for at, name in enumerate(instructions) if name == "RUN"
    )
    assert "useradd --uid 10001" in values("base", "RUN")[0]
    assert [json.loads(value) for value in values(image, "ENTRYPOINT")] == [["batchinfer"]]


@pytest.mark.parametrize("image", IMAGES)
def test_docker_image_keeps_models_in_a_volume(image: str) -> None:
    assert values(image, "VOLUME") == ["/models"]
    folders = re.findall(r"=(\S+)", values("base", "ENV")[0])
    assert folders
    assert all(folder.startswith("/models/") for folder in folders)


@pytest.mark.parametrize("image", IMAGES)
def test_docker_image_installs_existing_extras(image: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [extras] = [value for value in values(image, "ARG") if value.startswith("EXTRAS=")]
    assert set(extras.removeprefix("EXTRAS=").split(",")) <= project["optional-dependencies"].keys()


def test_docker_build_context_contains_the_package() -> None:
    kept = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    links = {
        path.readlink().parts[-1] for path in (ROOT / "batchinfer").iterdir() if path.is_symlink()
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {"batchinfer", "pyproject.toml", "constraints.txt", *links}
    assert needed | {project["readme"], *project["license-files"]} == kept
    assert all((ROOT / name).exists() for name in kept)


def test_docker_python_version_is_supported() -> None:
    [line] = [
        line
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("ARG PYTHON=")
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=" + line.removeprefix("ARG PYTHON=")
