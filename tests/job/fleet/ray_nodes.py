"""Clusters of several nodes on this machine, which come and go."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from batchinfer.job.fleet.on_ray.ray_cluster import environment

_STORE = 80 * 2**20


@contextmanager
def nodes_cluster() -> Iterator[Any]:
    """A cluster whose head runs no workers."""
    folder = tempfile.mkdtemp(dir="/tmp", prefix="bn-")  # Ray's sockets want short paths
    os.mkdir(f"{folder}/ray")
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_TMPDIR": folder,
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    with environment(settings):
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "temp_dir": folder, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args={**head, "object_store_memory": _STORE})
        try:
            yield made
        finally:
            made.shutdown()
    shutil.rmtree(folder)


def add_node(cluster: Any) -> Any:
    """A node with room for one worker.

    Who kills a raylet must reap it, else its workers take it for alive: that is done here.
    """
    node = cluster.add_node(num_cpus=1, object_store_memory=_STORE)
    Thread(target=node.all_processes["raylet"][0].process.wait, daemon=True).start()
    return node
