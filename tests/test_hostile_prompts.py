"""Rows and model folders that kill text processes, in ``run``, ``plan`` and ``run-batch``."""

from __future__ import annotations

import json
import os
import signal
import threading
from functools import partial
from pathlib import Path

import polars as pl
import psutil
import pyarrow as pa
import pytest

from batchinfer.errors import ExitCode, ModelError
from batchinfer.job.plan.plan import plan_job
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.text.processes.limits import Limits
from batchinfer.text.processes.pool import TextProcesses
from tests.job.datasets import write_parquet
from tests.models import CHAT_TEMPLATE, make_text_model
from tests.openai_batches import answers, request

PANIC = "x" * 60
CHOKING = (
    "{% for m in messages if m.content == 'loop' %}{% for a in range(99999) %}"
    "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
    "{% for m in messages if m.content == 'grow' %}{{ 'a' * 10 ** 11 }}{% endfor %}"
)
TEXTS = ["fine", PANIC, "loop", "good", "grow", "well"]
CODES = [None, "tokenizer_error", "template_error", None, "template_error", None]
TIGHT = Limits(cpu_seconds=0.5, shared_cpu_seconds=0.2, seconds=60, memory_bytes=2**28)
ENDLESS = Limits(cpu_seconds=1e5, shared_cpu_seconds=1e5, seconds=1e5)


@pytest.fixture
def text_processes_start_fast() -> None:
    """Replace the fixture of the same name: these tests look for fork servers among child
    processes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny random model whose tokenizer and chat template hang on some texts."""
    folder = make_text_model(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=1)
    (folder / "chat_template.jinja").write_text(CHOKING + CHAT_TEMPLATE)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated"}
    both = [{**split, "invert": False}, tokenizer["pre_tokenizer"]]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Set limits of the text processes."""
    processes = partial(TextProcesses, 2, request.param)
    monkeypatch.setattr("batchinfer.job.job.TextProcesses", processes)


def job(
    tmp_path: Path, model: Path, texts: list[str], bad_words: list[str | None] | None = None
) -> JobSpec:
    """Return a job that reads ``texts``, each with a bad word or none."""
    params = [word and json.dumps({"bad_words": [word]}) for word in bad_words or [None]]
    params *= len(texts) // len(params)
    columns = {"prompt": texts, "sampling_params": pa.array(params, pa.string())}
    rows = write_parquet(tmp_path / "rows.parquet", columns)
    return JobSpec.model_validate(
        {
            "model": {"name": str(model)},
            "input": {"path": str(rows)},
            "sampling": {"max_tokens": 2, "ignore_eos": True},
            "engine": {"device": "cpu", "num_kv_blocks": 64},
            "output": {"path": str(tmp_path / "out")},
            "errors": {"max_error_rate": 0.9},
        }
    )


@pytest.mark.parametrize("limits", [TIGHT], indirect=True, ids=["tight"])
@pytest.mark.usefixtures("limits")
def test_rows_that_kill_text_processes_become_errors(tmp_path: Path, model: Path) -> None:
    spec = job(tmp_path, model, TEXTS)

    planned = plan_job(spec)
    code = run_job(spec, quiet=True)

    errors = pl.read_parquet(tmp_path / "out" / "data" / "*.parquet")["error"].to_list()
    assert code is ExitCode.OK
    assert [error and error["code"] for error in errors] == CODES
    assert [error["message"] for error in errors if error] == [
        "the tokenizer failed: Onig: Regex search error: retry-limit-in-match over",
        "the template took more than 0.5 s of processor time",
        "the template needed more than 256 MiB of memory",
    ]
    assert planned["errors"] == {"template_error": 2, "tokenizer_error": 1}


@pytest.mark.parametrize("limits", [TIGHT], indirect=True, ids=["tight"])
@pytest.mark.usefixtures("limits")
def test_requests_that_kill_text_processes_become_errors(tmp_path: Path, model: Path) -> None:
    talks = ([{"role": "user", "content": text}] for text in TEXTS)
    requests = [
        request(text, messages=talk, max_tokens=2) for text, talk in zip(TEXTS, talks, strict=True)
    ]
    lines = answers(tmp_path, model, requests).values()
    bodies = [line["response"]["body"] for line in lines]
    assert [body["error"]["code"] if "error" in body else None for body in bodies] == CODES


@pytest.mark.parametrize("limits", [TIGHT], indirect=True, ids=["tight"])
@pytest.mark.usefixtures("limits")
def test_bad_words_that_kill_text_processes_become_row_errors(tmp_path: Path, model: Path) -> None:
    run_job(job(tmp_path, model, ["fine"] * 3, [None, "good", PANIC]), quiet=True)

    errors = pl.read_parquet(tmp_path / "out" / "data" / "*.parquet")["error"].to_list()
    assert [error and error["code"] for error in errors] == [None, None, "bad_sampling_params"]
    assert errors[2]["message"].startswith("sampling_params: bad_words: the tokenizer failed: Onig")


@pytest.mark.parametrize("limits", [ENDLESS], indirect=True, ids=["endless"])
@pytest.mark.usefixtures("limits")
def test_signal_ends_a_run_that_waits_for_a_row(tmp_path: Path, model: Path) -> None:
    before = set(psutil.Process().children(recursive=True))  # from other tests
    hanging = threading.Thread(target=_signal_once_a_child_hangs)
    hanging.start()

    code = run_job(job(tmp_path, model, ["fine", "loop"]), quiet=True)

    hanging.join()
    assert code is ExitCode.INTERRUPTED
    assert set(psutil.Process().children(recursive=True)) <= before


def _signal_once_a_child_hangs() -> None:
    while True:
        for spawner in psutil.Process().children():
            if any(child.cpu_times().user > 0.5 for child in spawner.children()):
                return os.kill(os.getpid(), signal.SIGTERM)


def test_invalid_chat_template_is_a_model_error(tmp_path: Path, model: Path) -> None:
    changed = tmp_path / "model"
    changed.mkdir()
    for file in model.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    (changed / "chat_template.jinja").write_text("{{ messages")

    with pytest.raises(ModelError, match="the model's chat template is not a valid Jinja2"):
        run_job(job(tmp_path, changed, ["fine"]), quiet=True)
