"""Prometheus metrics of a run, over HTTP and in a file."""

from __future__ import annotations

import os
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from batchinfer.console.format import printable
from batchinfer.errors import ExitCode, StorageError, UsageError
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from tests.job.datasets import write_parquet
from tests.job.fakes import job
from tests.job.output.test_resume import Build

HOSTILE = 'a"} 1\nbatchinfer_rows{x="\\\x1b[2J'


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def some_job(tmp_path: Path) -> JobSpec:
    prompts = [f"{row} asks" if row != 3 else "" for row in range(40)]
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": prompts})
    return job(tmp_path, errors={"max_error_rate": 1}).model_copy(update={"name": HOSTILE})


def parsed(text: str) -> dict[str, float]:
    """Check that all metrics belong to one job; return their values, keyed by name."""
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    assert {one.labels["job"] for one in samples} <= {printable(HOSTILE)}
    return {one.name: one.value for one in samples if one.labels.keys() == {"job"}}


def test_metrics_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, port = some_job(tmp_path), free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    seen: list[dict[str, float]] = []

    def look(step: int) -> None:
        with urllib.request.urlopen(url) as answer:
            seen.append(parsed(answer.read().decode()))

    assert run_job(spec, build=Build(look), metrics=str(port)) is ExitCode.OK
    assert f"metrics are available at {url}" in capsys.readouterr().err
    counters = [one["batchinfer_output_tokens_total"] for one in seen]
    assert counters == sorted(counters)
    last = seen[-1]
    assert last["batchinfer_rows"] == 40
    assert 20 < last["batchinfer_rows_finished_total"] < 40
    assert 0.5 < last["batchinfer_progress_ratio"] < 1
    assert 0 < last["batchinfer_kv_blocks_used"] <= last["batchinfer_kv_blocks"]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url)


def test_metrics_in_a_file(tmp_path: Path) -> None:
    spec, path = some_job(tmp_path), tmp_path / "batchinfer.prom"
    texts: list[str] = []
    build = Build(lambda step: texts.append(path.read_text()))
    assert run_job(spec, build=build, quiet=True, metrics=str(path)) is ExitCode.OK
    for text in texts:
        parsed(text)
    found = parsed(path.read_text())
    assert found["batchinfer_rows_finished_total"] == 40
    assert found["batchinfer_rows_failed_total"] == 1
    assert found["batchinfer_rows_running"] == 0
    assert 'batchinfer_phase_seconds_total{job="' in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir() if "prom" in entry.name] == [path.name]


def test_metrics_port_in_use(tmp_path: Path) -> None:
    spec = some_job(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"--metrics 127.0.0.1:{port}: .*in use"):
            run_job(spec, build=Build(), metrics=str(port))
    assert not (tmp_path / "out").exists()


def test_metrics_do_not_replace_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(StorageError, match="not a regular file"):
        run_job(some_job(tmp_path), build=Build(), metrics=str(pipe))
    assert pipe.is_fifo()


def test_metrics_count_reused_rows(tmp_path: Path) -> None:
    spec, path = some_job(tmp_path), tmp_path / "batchinfer.prom"
    first = spec.input.model_copy(update={"limit": 10})
    first_out = spec.output.model_copy(update={"path": str(tmp_path / "first")})
    before = spec.model_copy(update={"input": first, "output": first_out})
    assert run_job(before, build=Build(), quiet=True) is ExitCode.OK
    output = spec.output.model_copy(update={"reuse": (str(tmp_path / "first"),)})
    spec = spec.model_copy(update={"output": output})
    assert run_job(spec, build=Build(), quiet=True, metrics=str(path)) is ExitCode.OK
    found = parsed(path.read_text())
    assert found["batchinfer_rows_reused_total"] == 9  # all but the failed row
    assert found["batchinfer_rows_finished_total"] == 31
    assert found["batchinfer_rows"] == 40


@pytest.mark.parametrize(
    ("where", "error"),
    [
        *(("70000", UsageError), ("-1", UsageError), ("192.0.2.1:9100", UsageError)),
        *(("9100:abc", UsageError), ("host:", UsageError), ("::1:9100", UsageError)),
        *(("{}/no/x.prom", StorageError), ("{}", StorageError), ("", StorageError)),
    ],
)
def test_invalid_metrics_places(tmp_path: Path, where: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="--metrics ") as raised:
        run_job(some_job(tmp_path), build=Build(), metrics=where.format(tmp_path))
    message = str(raised.value).replace(str(tmp_path), "")
    assert str(os.getpid()) not in message, "the message has a temporary file's name"


def test_metrics_without_prometheus_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: Any = None
    monkeypatch.setitem(sys.modules, "prometheus_client", gone)
    with pytest.raises(UsageError, match=r"pip install '\.\[metrics\]'"):
        run_job(some_job(tmp_path), build=Build(), metrics="9100")
