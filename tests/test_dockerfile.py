"""The images of ``Dockerfile``: what a user of them relies on, as a parser of its own reads it."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

parser = pytest.importorskip("dockerfile_parse")
ROOT = Path(__file__).parents[1]
IMAGES = ("cuda", "cpu")

Instruction = tuple[str, str]


def stages() -> dict[str, list[Instruction]]:
    """Instructions of each stage, by its name."""
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
