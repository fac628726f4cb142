"""How the process that forks workers starts and ends, and how it reports failures."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from batchinfer.errors import DeviceError
from batchinfer.text.processes.limits import Limits
from batchinfer.text.processes.pool import TextProcesses
from batchinfer.text.processes.server_process import ForkRefusedError, ServerProcess, StoppedError
from batchinfer.text.prompts import Prompt
from tests.text.processes.conftest import (
    SOON_S,
    MakeProcesses,
    byte_level,
    fork_server,
    prompts_of,
    workers,
)


def test_dead_fork_server_raises_device_error(make_processes: MakeProcesses) -> None:
    prompts = prompts_of(make_processes(byte_level(), most=1))
    server = fork_server()
    for process in (*server.children(), server):
        process.kill()

    with pytest.raises(DeviceError, match=r"cannot run: it ended \(exit code -9\)"):
        prompts.build([{"text": b"a"}])
    assert isinstance(prompts.build([{"text": b"a"}])[0], Prompt)


def test_silent_fork_server_raises_device_error_and_is_replaced(
    make_processes: MakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(make_processes(byte_level()))
    below = [fork_server(), *workers()]
    below[0].suspend()  # first, because the server would replace a dead worker
    for worker in below[1:]:  # a living worker might make all prompts without the server
        worker.kill()

    with monkeypatch.context() as patch:
        patch.setattr("batchinfer.text.processes.server_process._ANSWER_S", 0.5)
        with pytest.raises(DeviceError, match=r"cannot run: it has not answered for 0\.5 s"):
            prompts.build([{"text": b"a"}] * 100)

    _, alive = psutil.wait_procs(below, SOON_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert isinstance(prompts.build([{"text": b"a"}])[0], Prompt)


def test_later_calls_repeat_why_the_fork_server_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several threads that wait for a silent server, the first one kills it."""
    server = ServerProcess(Limits())
    server.load(byte_level())
    server.fork()
    fork_server().suspend()
    monkeypatch.setattr("batchinfer.text.processes.server_process._ANSWER_S", 0.2)
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"cannot run: it has not answered for 0\.2 s"):
            server.fork()
    server.close()


def test_stop_ends_the_wait_for_a_silent_fork_server(make_processes: MakeProcesses) -> None:
    processes = make_processes(byte_level())
    prompts = prompts_of(processes)
    fork_server().suspend()  # first, because the server would replace a dead worker
    for worker in workers():  # a living worker might make all prompts without the server
        worker.kill()
    threading.Timer(0.2, processes.stop).start()

    with pytest.raises(StoppedError):
        prompts.build([{"text": b"a"}] * 100)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("executable", "", "Python is embedded in another program"),
        ("frozen", True, "is a frozen application"),
        ("executable", "/nowhere/python", r"cannot run: .*No such file.*nowhere"),
    ],
)
def test_missing_python_interpreter_raises_device_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, message: str
) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)

    with pytest.raises(DeviceError, match=message):
        TextProcesses()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exec sleep 1000", r"it has not answered for 0\.5 s"),
        ("echo 'Welcome! How may I help you today?' >&0; exec sleep 1000", "app is not a Python"),
        ("echo 'no such option: -c' >&2; exit 3", "no such option: -c"),
    ],
    ids=["silent", "speaks", "ends"],
)
def test_executable_that_is_not_python_is_named_in_the_error(
    make_processes: MakeProcesses,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    script: str,
    message: str,
) -> None:
    app = tmp_path / "app"
    app.write_text(f"#!/bin/sh\n{script}\n")
    app.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(app))
    if "answered" in message:
        monkeypatch.setattr("batchinfer.text.processes.server_process._ANSWER_S", 0.5)

    with pytest.raises(DeviceError, match=f"(?s){message}.*its command is {app} -c"):
        make_processes(byte_level())


def test_error_of_a_fork_server_that_fails_to_start_ends_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, make_processes: MakeProcesses
) -> None:
    boot = "import sys; sys.stderr.write('text ' * 10**5 + chr(10)); raise ValueError('server')"
    monkeypatch.setattr("batchinfer.text.processes.server_process._BOOT", boot)
    until = threading.Timer(60, lambda: fork_server().kill())
    until.daemon = True
    until.start()

    with pytest.raises(DeviceError, match="ValueError: server"):
        prompts_of(make_processes(byte_level()))
    until.cancel()


def test_one_worker_builds_all_prompts_if_the_system_refuses_to_fork(
    make_processes: MakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(make_processes(byte_level(), most=2))  # forks one worker

    def refused(_: ServerProcess) -> None:
        raise ForkRefusedError("full")

    monkeypatch.setattr(ServerProcess, "fork", refused)

    made = prompts.build([{"text": b"%d" % at} for at in range(100)])
    assert [getattr(result, "text", None) for result in made] == [str(at) for at in range(100)]
    with pytest.raises(DeviceError, match="cannot run: full"):
        prompts_of(make_processes(byte_level()))


def test_workers_do_not_use_closed_standard_streams() -> None:
    code = "from tests.text.processes.test_fork_server import print_astray; print_astray()"
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]

    assert subprocess.run(closed, timeout=100, check=False).returncode == 7


def print_astray() -> None:
    """Write to standard streams, and make prompts; exit with code 7 if the prompts are right."""
    processes = TextProcesses(1, Limits())
    for descriptor in range(3):
        with suppress(OSError):
            os.write(descriptor, b"astray")
    processes.load(byte_level())
    (made,) = prompts_of(processes).build([{"text": b"a"}])
    sys.exit(7 if isinstance(made, Prompt) else 1)


def test_forked_process_starts_its_own_workers_and_exits() -> None:
    code = "from tests.text.processes.test_fork_server import use_on_both_sides as use; use()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert (done.stdout, done.stderr) == ("forked is right\nparent is right\n", "")


def use_on_both_sides() -> None:
    """Fork, and make prompts in both processes, first in the new one."""
    processes = TextProcesses(2, Limits())
    processes.load(byte_level())
    prompts = prompts_of(processes)
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0) == (pid, 0)
    rows = [{"text": b"%d %d" % (pid, at)} for at in range(100)]
    made = [getattr(result, "text", None) for result in prompts.build(rows)]
    assert made == [f"{pid} {at}" for at in range(100)]
    print("parent" if pid else "forked", "is right", flush=True)
