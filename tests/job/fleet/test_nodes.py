"""A fleet on several nodes, which come and go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from batchinfer.errors import ExitCode
from tests.job.fleet.engines import KillsNode, WaitsForAnother, how_often
from tests.job.fleet.jobs import expected, fleet_job, part_hashes, run, write_rows
from tests.job.fleet.ray_nodes import add_node, nodes_cluster

ROWS = 600


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One cluster for all jobs here."""
    with nodes_cluster() as made:
        yield made


@pytest.mark.long
def test_a_node_that_dies_loses_nothing(cluster: Any, tmp_path: Path) -> None:
    nodes = [add_node(cluster), add_node(cluster)]
    write_rows(tmp_path, ROWS)
    spec = fleet_job(tmp_path, scale={"cluster": cluster.address})
    assert run(spec, KillsNode(tmp_path)) == ExitCode.OK
    assert how_often(tmp_path, "node") == 1
    assert part_hashes(tmp_path / "out") == expected(tmp_path, spec)
    for node in nodes:
        cluster.remove_node(node, allow_graceful=False)


@pytest.mark.long
def test_a_node_that_joins_takes_rows(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private.node import Node

    # A node that is started outside the main thread cannot take signals; the fixture ends it.
    monkeypatch.setattr(Node, "_register_shutdown_hooks", lambda node: None)
    first = add_node(cluster)
    write_rows(tmp_path, ROWS)
    spec = fleet_job(tmp_path, scale={"cluster": cluster.address, "min_workers": 1})
    joined: list[Any] = []
    over = Event()

    def join() -> None:
        while not how_often(tmp_path, "engine"):
            time.sleep(0.05)
        joined.append(add_node(cluster))
        over.wait()  # a raylet dies with the thread that started it

    joiner = Thread(target=join, daemon=True)
    joiner.start()
    assert run(spec, WaitsForAnother(tmp_path)) == ExitCode.OK
    over.set()
    joiner.join()
    assert how_often(tmp_path, "engine") == 2
    assert part_hashes(tmp_path / "out") == expected(tmp_path, spec)
    for node in (first, *joined):
        cluster.remove_node(node, allow_graceful=False)
