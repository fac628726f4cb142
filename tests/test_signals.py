"""Effects of signals before, during and after the part of a process that can lose work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from batchinfer.errors import ExitCode
from batchinfer.process.process import SIGNALS, leave_on_signals, stop_signals
from tests.console.terminal import PseudoTerminal


def run(script: str, number: signal.Signals) -> subprocess.CompletedProcess[str]:
    """Run a script in which ``send()`` sends the signal to the process itself."""
    start = (
        "import os, signal\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # under ``nohup``, pytest ignores SIGHUP
        "from batchinfer.process.process import ignore_signals, leave_on_signals, stop_signals\n"
        f"send = lambda: os.kill(os.getpid(), {int(number)})\n"
    )
    command = [sys.executable, "-c", start + script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("number", SIGNALS)
def test_leave_on_signals_ends_the_process_with_code_75(number: signal.Signals) -> None:
    done = run("leave_on_signals()\nsend()\nprint('still here')", number)
    assert (done.returncode, done.stdout) == (ExitCode.INTERRUPTED, "")
    assert done.stderr == "stopped; run the same command again\n"


@pytest.mark.parametrize(("term", "before"), [("xterm", "\r\x1b[K"), ("dumb", "\r\n")])
def test_last_message_clears_the_terminal_line(
    term: str, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "from batchinfer.process.process import leave_on_signals\nimport os, signal\n"
    script += "leave_on_signals()\nos.write(2, b'waiting^C')\nos.kill(os.getpid(), signal.SIGINT)"
    environment = {**os.environ, "TERM": term}
    with PseudoTerminal(monkeypatch) as pseudo:
        command = [sys.executable, "-c", script]
        subprocess.run(command, stderr=pseudo.terminal, check=False, env=environment)
    assert pseudo.text == f"waiting^C{before}stopped; run the same command again\r\n"


def test_signals_are_handled_before_heavy_imports() -> None:
    """Until signals are handled, Ctrl-C ends with Python's traceback instead of exit code 75."""
    code = (
        "import sys\n"
        "before = {*sys.modules}\n"
        "from batchinfer.process import process\n"
        "def handle(*_): raise SystemExit(' '.join({*sys.modules} - before))\n"
        "process._handle_with = handle\n"
        "from batchinfer.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    ours = {name for name in done.stderr.split() if name.startswith("batchinfer")}
    expected = {"errors", "process", "process.process", "cli", "cli.program", "__main__"}
    assert ours == {"batchinfer", *(f"batchinfer.{name}" for name in expected)}
    assert not {"dataclasses", "inspect", "typer"} & {*done.stderr.split()}


@pytest.mark.parametrize("asked", [[], ["--log-format", "json"], ["--log-format=json"]])
def test_signal_during_imports_uses_the_log_format(asked: list[str]) -> None:
    script = (
        "import sys\n"
        "class Sender:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'batchinfer.cli.commands':\n"
        "            send()\n"
        "sys.meta_path.insert(0, Sender())\n"
        f"sys.argv = ['batchinfer', 'run', 'job.yaml', *{asked}]\n"
        "from batchinfer.__main__ import main\n"
        "main()\n"
    )
    done = run(script, signal.SIGTERM)
    assert (done.returncode, done.stdout) == (ExitCode.INTERRUPTED, "")
    if not asked:
        assert done.stderr == "stopped; run the same command again\n"
        return
    [last] = [json.loads(line) for line in done.stderr.splitlines()]
    assert (last["event"], last["exit_code"]) == ("exit", ExitCode.INTERRUPTED)


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_are_ignored_after_the_job_has_ended(number: signal.Signals) -> None:
    script = (
        "leave_on_signals()\n"
        "with stop_signals() as stop:\n"
        "    assert not stop.is_set()\n"
        "    send()\n"
        "    assert stop.is_set()\n"
        "send()\n"
        "ignore_signals()\n"
        "send()\n"
        "class Last:\n"
        "    def __del__(self, send=send):\n"
        "        send()\n"
        "import atexit, sys\n"
        "atexit.register(send)\n"
        "sys.last = Last()\n"
    )
    done = run(script, number)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")


def test_second_sigint_ends_the_process_at_once() -> None:
    done = run("with stop_signals():\n    send()\n    send()\n    print('here')", signal.SIGINT)
    assert (done.returncode, done.stdout) == (ExitCode.INTERRUPTED, "")


def test_stop_signals_restores_other_handlers() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with stop_signals():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_stop_signals_outside_the_main_thread() -> None:
    seen: list[bool] = []

    def work() -> None:
        leave_on_signals()
        with stop_signals() as stop:
            seen.append(stop.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


AT_EACH_LINE = """
import itertools, json, signal, sys, threading
from batchinfer.process.process import stop_signals

def stopped_at(line):
    "Whether a wait that is interrupted at its line-th line says so; None: it has fewer."
    lines = itertools.count()
    ours = {threading.__file__, stop_signals.__wrapped__.__code__.co_filename}
    def trace(frame, event, _):
        if frame.f_code.co_filename in ours and event == "line" and next(lines) == line:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return trace
    with stop_signals() as stop:
        sys.settrace(trace)
        said = stop.wait(0.001)
        sys.settrace(None)
    return said if next(lines) > line else None

found = [*itertools.takewhile(lambda said: said is not None, map(stopped_at, itertools.count()))]
print(json.dumps(found))
"""


def test_signalled_event_wait_survives_a_signal_at_any_line() -> None:
    """``Event.wait`` holds a lock that ``Event.set`` needs, so a signal handler could deadlock."""
    command = [sys.executable, "-c", AT_EACH_LINE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    said = json.loads(done.stdout)
    assert len(said) > 3
    assert all(said)
