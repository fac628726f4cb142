"""What the page on fleets shows is valid."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main

from batchinfer import cli
from batchinfer.job.spec.spec import ScaleSpec
from batchinfer.job.spec.yaml import parse_yaml
from tests.docs.pages import ROOT, Block, blocks

BLOCKS = list(blocks(ROOT / "docs" / "fleet.md"))


def the(language: str, word: str) -> Block:
    (found,) = [b for b in BLOCKS if b.language == language and word in b.text]
    return found


def commands() -> list[list[str]]:
    """The arguments of each ``batchinfer run`` on the page."""
    lines = "\n".join(block.text for block in BLOCKS).replace("\\\n", " ").splitlines()
    found = [line.partition("batchinfer run ")[2] for line in lines]
    return [shlex.split(words) for words in found if words]


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_runs_have_options_that_there_are(arguments: list[str]) -> None:
    group: Any = typer.main.get_command(cli.app)
    context = group.commands["run"].make_context("run", list(arguments))
    workers, cluster = context.params["workers"], context.params["cluster"]
    ScaleSpec(workers=workers if workers == "auto" else int(workers), cluster=cluster or "local")


def test_the_keys_are_valid() -> None:
    keys: dict[str, Any] = parse_yaml(the("yaml", "scale:").text, "job").data["scale"]
    assert ScaleSpec(**keys).start_timeout_s == 20 * 60


SCRIPTS = [block for block in BLOCKS if block.text.startswith("#!")]


@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: block.name)
def test_scripts_are_valid(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(block.text)
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_pods_mount_the_volumes_they_have_and_ask_for_a_token() -> None:
    job: dict[str, Any] = parse_yaml(the("yaml", "RayJob").text, "job").data
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in pods):
        mounted = {mount["name"] for c in pod["containers"] for mount in c["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
