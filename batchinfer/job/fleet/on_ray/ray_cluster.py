"""A Ray cluster to run a fleet in: one of this machine's own, or one that is there.

An embedded cluster leaves nothing: its folder is its own, and a process that watches its driver
deletes it whatever the driver dies of. All of Ray's ports listen on every interface, so that
nothing is let in without a token; an embedded one has a token that nobody else is told.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from typing import Any

from batchinfer.errors import DeviceError, one_line

_LONGEST_FOLDER = 22
"""Characters of a folder's name: sockets lie below it, whose paths end at 107."""
_STORE_BYTES = 80 * 2**20
"""What goes through Ray's object store is small."""
_NODE_S = 30.0
"""How long a node may take to come up; as Ray has it."""
_POLL_S = 0.01
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_DEDUP_LOGS": "0",
}
"""Unless the user has set them: no telemetry, dead nodes noticed in seconds."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

_WATCH = """
import os, shutil, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
folder = sys.argv[1]
sys.stdin.read()
def link(path):
    try:
        return os.readlink(path)
    except OSError:
        return ""
def is_of_it(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if folder.encode() in file.read():
                return True
        files = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    return any(link(f"/proc/{pid}/fd/{file}").startswith(folder) for file in files)
def left():
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    return [pid for pid in pids - {os.getpid(), os.getppid()} if is_of_it(pid)]
for turn in range(100):
    pids = left()
    if not pids:
        break
    if turn > 20:
        for pid in pids:
            try:
                os.kill(pid, 9)
            except OSError:
                pass
    time.sleep(0.1)
for turn in range(20):
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.exists(folder):
        break
    time.sleep(0.1)
"""
"""Program that waits for its driver's end, then for the cluster's, and deletes its folder.

Workers give themselves names without the folder; but they write their logs there.
"""


@contextmanager
def connected(cluster: str, *, num_workers: int, preload: Sequence[str] = ()) -> Iterator[int]:
    """Be the driver in a Ray cluster; where this process is one already, it stays that.

    Args:
        cluster: ``local``: one of this machine's own, for this job alone; ``auto``: the one that
            RAY_ADDRESS names; else its host:port.
        num_workers: workers of a local one.
        preload: modules that the processes of a local one import while it comes up.

    Yields:
        How many GPUs it has.

    Raises:
        DeviceError: the cluster cannot be started, or not be reached.
    """
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        yield _num_gpus(ray)
        return
    local = cluster == "local"
    with (
        environment(_local_settings(preload) if local else {}),
        own_folder() if local else nullcontext("") as folder,
    ):
        with _signals_kept():
            ray = import_module("ray")
            try:
                _init(ray, cluster, folder, num_workers)
            except Exception as error:  # Ray raises whatever it met
                raise DeviceError(
                    f"the Ray cluster ({cluster}) cannot be used: {one_line(error)}"
                ) from None
        try:
            yield _num_gpus(ray)
        finally:
            with _signals_kept():
                ray.shutdown()


def _num_gpus(ray: Any) -> int:
    return int(ray.cluster_resources().get("GPU", 0))


def _init(ray: Any, cluster: str, folder: str, num_workers: int) -> None:
    settings: dict[str, object] = {
        "configure_logging": False,
        "log_to_driver": False,
        "include_dashboard": False if folder else None,
    }
    if folder:
        settings |= {
            "address": "local",
            "num_cpus": num_workers,
            "object_store_memory": _STORE_BYTES,
            "_temp_dir": ray_folder(folder),
        }
        _start_no_more_than_needed()
    else:
        settings["address"] = "auto" if cluster == "auto" else cluster
    # Ray prints what becomes of workers on stdout, which is not its own here.
    private: Any = import_module("ray._private.worker")
    private.listen_error_messages = lambda *_: None
    with _node_asked_for_often() if folder else nullcontext():
        ray.init(**settings)


def _start_no_more_than_needed() -> None:
    """Have Ray start no server for its dashboard, no autoscaler, and nothing that reads logs.

    Nobody asks them here, and there is no setting for it: with the first two seconds pass at a
    start and another at the end, in which they also take cores from workers.
    """
    node: Any = import_module("ray._private.node").Node
    for name in ("start_api_server", "start_monitor", "start_log_monitor"):
        setattr(node, name, lambda *_, **__: None)


@contextmanager
def _node_asked_for_often() -> Iterator[None]:
    """Have Ray see at once that its node is there: it asks, and asks again a second later."""
    services: Any = import_module("ray._private.services")
    get_node = services.get_node

    def get_node_when_there(gcs_address: str, node_id: str) -> Any:
        clients: Any = import_module("ray._raylet")
        client = clients.GcsClient(gcs_address)
        until = time.monotonic() + _NODE_S
        while not client.get_all_node_info(timeout=_NODE_S) and time.monotonic() < until:
            time.sleep(_POLL_S)
        return get_node(gcs_address, node_id)

    services.get_node = get_node_when_there
    try:
        yield
    finally:
        services.get_node = get_node


def _read_settings_again() -> None:
    """Ray reads its variables when it is imported, which may have been before they were set."""
    core = import_module("ray._raylet")
    core.Config.initialize("")
    core.AuthenticationTokenLoader.instance().reset_cache()


def _local_settings(preload: Sequence[str]) -> dict[str, str]:
    """Variables of an embedded cluster's processes."""
    return {
        "RAY_preload_python_modules": ",".join(preload),
        "RAY_worker_niceness": "0",  # else 15, and whatever else runs here comes first
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Have variables set, for Ray in this process and for those that are started meanwhile."""
    wanted = {name: os.environ.get(name, value) for name, value in _SETTINGS.items()} | dict(
        settings
    )
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    if "ray" in sys.modules:
        _read_settings_again()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if "ray" in sys.modules:
            _read_settings_again()


@contextmanager
def own_folder() -> Iterator[str]:
    """A folder that goes when this process does, and with it whoever has a file open there."""
    parent = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="bi-", dir=parent if len(parent) < _LONGEST_FOLDER else "/tmp")
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WATCH, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        assert watcher.stdin is not None
        watcher.stdin.close()
        watcher.wait()


def ray_folder(own: str) -> str:
    """Ray's folder, which it lets everybody write to: inside one that nobody else may enter."""
    return f"{own}/r"


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself when it connects: keep what was there."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(ValueError):  # not in the main thread
                signal.signal(number, handler)
