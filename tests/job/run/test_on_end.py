"""Notifications of ``on_end``: one for each end of a run, and without secrets."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from batchinfer.errors import ExitCode, JobError, UsageError
from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.shared_claim import Role
from batchinfer.job.fingerprint import fingerprint_facts
from batchinfer.job.run import on_end
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from batchinfer.job.spec.spec import JobSpec, resolved
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job
from tests.job.job_files import MINIMAL, write_job
from tests.job.output.test_resume import Build, fail_at, stop_at


class Hook(ThreadingHTTPServer):
    """A webhook server that keeps the messages it gets."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.authorized: list[str | None] = []
        self.code = 204
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/secret-token?key=secret"


class _Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.messages.append(json.loads(body))
        self.server.authorized.append(self.headers["Authorization"])
        self.send_response(self.server.code)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Hook]:
    with Hook() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def some_job(tmp_path: Path, **on_end_keys: Any) -> JobSpec:
    prompts = [f"{row} asks" if row != 3 else "" for row in range(40)]
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": prompts})
    spec = job(tmp_path, errors={"max_error_rate": 0.1}, on_end=on_end_keys)
    return spec.model_copy(update={"name": 'a "job"\x1b[2J'})


def test_webhook_credentials_are_sent_as_a_header(
    tmp_path: Path, hook: Hook, capsys: pytest.CaptureFixture[str]
) -> None:
    url = hook.url.replace("//", "//me:a%20secret@")
    assert run_job(some_job(tmp_path, webhook=url), build=FakeBuild()) is ExitCode.OK
    encoded = base64.b64encode(b"me:a secret").decode()
    assert hook.authorized == [f"Basic {encoded}"]
    printed = "".join(capsys.readouterr())
    assert "on_end" not in printed
    assert "secret" not in printed


def test_webhook_gets_each_outcome_once(
    tmp_path: Path, hook: Hook, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = some_job(tmp_path, webhook=hook.url)
    out = str(tmp_path / "out")
    assert run_job(spec, build=Build(stop_at(25))) is ExitCode.INTERRUPTED
    with pytest.raises(JobError):
        run_job(spec, build=Build(fail_at(1, UsageError("it cannot be"))))
    with pytest.raises(ZeroDivisionError):
        run_job(spec, build=Build(fail_at(1, ZeroDivisionError())))
    assert run_job(spec, build=FakeBuild()) is ExitCode.OK
    assert run_job(spec, build=FakeBuild()) is ExitCode.OK  # nothing to do, so no notification
    strict = spec.model_copy(
        update={"errors": spec.errors.model_copy(update={"max_error_rate": 0})}
    )
    code = run_job(strict, build=FakeBuild(), overwrite=True)
    assert code is ExitCode.TOO_MANY_ROW_ERRORS
    stopped, failed, bug, well, many = hook.messages
    assert [message["outcome"] for message in hook.messages] == [
        *("stopped", "failed", "failed", "succeeded", "too_many_errors")
    ]
    assert [message["exit_code"] for message in hook.messages] == [75, 2, 1, 0, 3]
    assert {message["job"] for message in hook.messages} == {spec.name}
    assert {message["output"] for message in hook.messages} == {out}
    assert stopped["summary"] is stopped["error"] is None
    assert stopped["rows"]["total"] == 40
    assert 0 < stopped["rows"]["finished"] < 40
    assert failed["error"] == "it cannot be"
    assert "bug" in bug["error"]
    assert well["rows"] == many["rows"] == {"total": 40, "finished": 40, "error": 1}
    assert well["summary"] == f"{out}/summary.json"
    printed = "".join(capsys.readouterr())
    assert "secret" not in printed
    assert all(
        b"secret" not in path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    )


def test_webhook_failure_is_shown(
    tmp_path: Path, hook: Hook, capsys: pytest.CaptureFixture[str]
) -> None:
    hook.code = 500
    spec = some_job(tmp_path, webhook=hook.url)
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    assert capsys.readouterr().err == (
        f"on_end.webhook http://127.0.0.1:{hook.server_port}/…: "
        "the server answered with HTTP status 500\n"
    )
    gone = some_job(tmp_path, webhook="http://127.0.0.1:1/secret")
    assert run_job(gone, build=FakeBuild(), quiet=True, overwrite=True) is ExitCode.OK
    assert capsys.readouterr().err.endswith("/…: Connection refused\n")


def test_on_end_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read()); print('done $HOME')"
    file = tmp_path / "message; $(touch x).json"
    spec = some_job(tmp_path, command=[sys.executable, "-c", code, str(file)])
    assert run_job(spec, build=FakeBuild(), as_json=True) is ExitCode.OK
    assert json.loads(file.read_bytes())["outcome"] == "succeeded"
    printed = capfd.readouterr()
    assert json.loads(printed.out)["rows"]["ok"] == 39  # the whole of stdout
    assert "done $HOME" in printed.err


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_full_stdout_fails_the_run_but_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "message.json"
    code = "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())"
    spec = some_job(tmp_path, command=[sys.executable, "-c", code, str(file)])
    for _ in range(2):  # the second run has nothing to do
        with open("/dev/full", "w") as full, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            with pytest.raises(OSError, match="No space left") as raised:
                run_job(spec, build=FakeBuild(), as_json=True)
            with suppress(OSError):
                full.close()
        assert raised.value.filename is None  # the program then says that stdout is full
    assert json.loads(file.read_bytes())["outcome"] == "succeeded"
    assert (tmp_path / "out" / "_SUCCESS").exists()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("/no/such/program", "--key=secret"), "on_end.command /no/such/program: No such file"),
        ((sys.executable, "-c", "raise SystemExit(3)"), ": the command ended with exit code 3"),
        ((sys.executable, "-c", "import time; time.sleep(60)"), ": the command was killed after"),
    ],
)
def test_on_end_command_failures(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.setattr(on_end, "LIMIT_S", 0.2 if "sleep" in command[-1] else 30.0)
    spec = some_job(tmp_path, command=command)
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    [line] = capfd.readouterr().err.splitlines()
    assert says in line
    assert "secret" not in line


def test_output_of_an_on_end_command_is_cut(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; print('begins'); sys.stderr.write('x' * 3_000_000 + 'ends')"
    spec = some_job(tmp_path, command=[sys.executable, "-u", "-c", code])
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    printed = capfd.readouterr().err
    assert printed.startswith("begins\nxxx")
    assert "ends" not in printed
    assert printed.endswith("\non_end.command: 2,934,475 more bytes of output are left out\n")
    assert len(printed) < on_end.MOST_OUTPUT + 100


def test_webhook_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_end, "LIMIT_S", 0.05)
    gone = Event()

    def call() -> None:
        gone.wait()

    assert on_end._within_limit(call) == "no answer within 0.05 s"
    gone.set()


def test_last_shard_notifies(tmp_path: Path, hook: Hook) -> None:
    spec = some_job(tmp_path, webhook=hook.url)
    assert run_job(spec, build=Build(stop_at(1)), role=Role(Shard(0, 2))) is ExitCode.INTERRUPTED
    assert run_job(spec, build=FakeBuild(), role=Role(Shard(0, 2))) is ExitCode.OK
    assert hook.messages == []
    assert run_job(spec, build=FakeBuild(), role=Role(Shard(1, 2))) is ExitCode.OK
    assert [message["outcome"] for message in hook.messages] == ["succeeded"]


def test_on_end_is_not_in_the_fingerprint(tmp_path: Path) -> None:
    with_hook = some_job(tmp_path, webhook="https://user:secret@host/secret?secret#secret")
    assert fingerprint_facts(with_hook, {}) == fingerprint_facts(some_job(tmp_path), {})
    assert resolved(with_hook)["on_end"] == {"webhook": "https://host/…", "command": None}
    with_command = some_job(tmp_path, command=["curl", "-H", "secret"])
    assert resolved(with_command)["on_end"]["command"] == ["curl", "…"]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("on_end.webhook=ftp://secret", "webhook must be an http:// or https:// URL"),
        ("on_end.webhook=https://host:99999/secret", "webhook must be an http://"),
        ("on_end.webhook=[secret]", "on_end.webhook is …; it must be a string"),
        ("on_end={webhook: 'https://a/secret', command: [x]}", "keep one"),
        ("on_end.command=[]", "command must be a program and its arguments"),
        ("on_end.command=secret", "it must be a list"),
        ("on_end.comand=[x]", "did you mean command?"),
    ],
)
def test_invalid_on_end_keys(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        load_job(write_job(tmp_path, MINIMAL), overrides=[override])
    assert says in str(raised.value)
    assert "secret" not in str(raised.value)
