"""The commands and manifests on the page about fleets are valid."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import version
from typing import Any

import pytest
import typer.main

from batchinfer.cli import commands as cli
from batchinfer.job.spec.sections import ScaleSpec
from batchinfer.job.spec.yaml import parse_yaml
from tests.docs.pages import ROOT, Block, blocks

BLOCKS = list(blocks(ROOT / "docs" / "fleet.md"))


def the(language: str, word: str) -> Block:
    (found,) = [b for b in BLOCKS if b.language == language and word in b.text]
    return found


def commands() -> list[list[str]]:
    """Return the arguments of each ``batchinfer run`` on the page."""
    lines = "\n".join(block.text for block in BLOCKS).replace("\\\n", " ").splitlines()
    found = [line.partition("batchinfer run ")[2] for line in lines]
    return [shlex.split(words) for words in found if words]


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_fleet_page_uses_existing_options(arguments: list[str]) -> None:
    group: Any = typer.main.get_command(cli.app)
    context = group.commands["run"].make_context("run", list(arguments))
    workers, cluster = context.params["workers"], context.params["cluster"]
    if not context.params["worker"]:
        number = workers if workers == "auto" else int(workers)
        ScaleSpec(workers=number, cluster=cluster or "local")


def test_fleet_page_keys_are_valid() -> None:
    keys: dict[str, Any] = parse_yaml(the("yaml", "scale:").text, "job").data["scale"]
    assert ScaleSpec(**keys).start_timeout_s == 20 * 60


@pytest.fixture
def ray_job() -> dict[str, Any]:
    """Return the manifest of the RayJob."""
    found: dict[str, Any] = parse_yaml(the("yaml", "RayJob").text, "job").data
    return found


# Fields that the page uses, from https://ray-project.github.io/kuberay/reference/api/
RAY_JOB = {"entrypoint", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec"}
RAY_CLUSTER = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
GROUP = {"rayStartParams", "template"}
WORKER_GROUP = {*GROUP, "groupName", "replicas", "minReplicas", "maxReplicas"}


def test_ray_job_uses_known_kuberay_fields(ray_job: dict[str, Any]) -> None:
    assert (ray_job["apiVersion"], ray_job["kind"]) == ("ray.io/v1", "RayJob")
    assert re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", ray_job["metadata"]["name"])
    cluster = ray_job["spec"]["rayClusterSpec"]
    assert (ray_job["spec"].keys(), cluster.keys()) == (RAY_JOB, RAY_CLUSTER)
    assert cluster["headGroupSpec"].keys() == GROUP
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert group["template"].keys() == {"spec"}
        assert {"name", "image"} <= group["template"]["spec"]["containers"][0].keys()
    for group in cluster["workerGroupSpecs"]:
        assert group.keys() == WORKER_GROUP
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_ray_job_has_a_gpu_per_worker_and_none_on_the_head(ray_job: dict[str, Any]) -> None:
    """The launcher runs in the head's pod, which therefore needs no GPU and gets no worker."""
    cluster = ray_job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = group["replicas"] * container["resources"]["limits"]["nvidia.com/gpu"]
    words = shlex.split(ray_job["spec"]["entrypoint"])
    assert words[words.index("--workers") + 1] == str(gpus)
    assert words[words.index("--cluster") + 1] == "auto"
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}


def test_ray_job_uses_the_tested_ray_version(ray_job: dict[str, Any]) -> None:
    assert ray_job["spec"]["rayClusterSpec"]["rayVersion"] == version("ray")


def test_pods_mount_their_volumes_and_request_a_token(ray_job: dict[str, Any]) -> None:
    cluster = ray_job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    words = shlex.split(ray_job["spec"]["entrypoint"])
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounts = [mount for c in pod["containers"] for mount in c["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod["volumes"]}
        assert words[2] in {mount["mountPath"] for mount in mounts}, "the job file"
