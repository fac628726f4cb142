"""Jobs and calls compile the sampling kernels of a step before the step runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer import LLM, SamplingParams
from batchinfer.errors import ExitCode
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from tests.job.datasets import write_parquet
from tests.test_tools import LAMP, make_tool_model
from tests.worker.sampling.compiled import WatchedEngines

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)
DRAWS, FILTERS, EDITS, MASKS, JUDGES = (
    *("_sample_kernel", "_sample_rest_kernel"),
    *("_penalties_kernel", "_token_bitmask_kernel", "row_stats"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> WatchedEngines:
    watched = WatchedEngines(monkeypatch)
    monkeypatch.setattr("batchinfer.llm.llm.build_engine", watched.build)
    return watched


def names(engines: WatchedEngines) -> set[str]:
    return {name for name, *_ in engines.in_steps}


def test_warm_up_compiles_all_kernels_of_an_llm_call(model: Path, engines: WatchedEngines) -> None:
    llm = LLM(str(model), device="cpu", num_kv_blocks=64)
    llm.generate("a", GREEDY, use_tqdm=False)
    assert names(engines) == {DRAWS}
    params = [
        SamplingParams(max_tokens=2, top_k=5),
        SamplingParams(max_tokens=3, temperature=0.0, logit_bias={5: 2.0}),
        SamplingParams(max_tokens=2, prompt_logprobs=1),
    ]
    llm.generate(["a", "b", "cd"], params, use_tqdm=False)
    assert names(engines) == {DRAWS, FILTERS, EDITS, JUDGES}
    assert not engines.late


def test_warm_up_compiles_kernels_of_chats_with_tools(model: Path, engines: WatchedEngines) -> None:
    llm = LLM(str(model), device="cpu", num_kv_blocks=128, tool_parser="hermes")
    talk: Any = [{"role": "user", "content": "hello"}]
    llm.chat(talk, GREEDY, tools=[LAMP], tool_choice="required", use_tqdm=False)
    assert names(engines) == {DRAWS, MASKS}
    assert not engines.late


def run(tmp_path: Path, engines: WatchedEngines, rows: dict[str, Any], **sections: Any) -> None:
    write_parquet(tmp_path / "in.parquet", rows)
    fields = {
        "input": {"path": "in.parquet"},
        "engine": {"device": "cpu", "num_kv_blocks": 200},
        "output": {"path": str(tmp_path / "out")},
        **sections,
    }
    (tmp_path / "job.yaml").write_text(json.dumps(fields))
    spec = load_job(tmp_path / "job.yaml")
    assert run_job(spec, build=engines.build, quiet=True) is ExitCode.OK
    assert not engines.late


def test_warm_up_compiles_kernels_of_score_jobs(
    model: Path, engines: WatchedEngines, tmp_path: Path
) -> None:
    run(
        *(tmp_path, engines, {"prompt": ["so? ", "or "], "choices": [["yes", "no"], ["not"]]}),
        task="score",
        model={"name": str(model)},
        prompt={"chat_template": "none"},
        score={"completions_column": "choices"},
    )
    assert names(engines) == {DRAWS, JUDGES}


@pytest.mark.parametrize("are_of_rows", [False, True])
def test_warm_up_compiles_kernels_of_jobs_with_tools(
    model: Path, engines: WatchedEngines, tmp_path: Path, *, are_of_rows: bool
) -> None:
    rows: dict[str, Any] = {"prompt": ["hello", "go"]}
    tools: dict[str, Any] = {"tools": [LAMP]}
    if are_of_rows:
        rows["tools"], tools = [json.dumps([LAMP])] * 2, {"tools_column": "tools"}
    run(
        *(tmp_path, engines, rows),
        model={"name": str(model)},
        prompt={"column": "prompt", "tool_choice": "required", **tools},
        sampling={"max_tokens": 3, "temperature": 0},
        output={"path": str(tmp_path / "out"), "tool_parser": "hermes"},
    )
    assert names(engines) == {DRAWS, MASKS}


def test_warm_up_compiles_kernels_of_row_sampling_params(
    model: Path, engines: WatchedEngines, tmp_path: Path
) -> None:
    own = [None, {"top_p": 0.5}, {"temperature": 0, "repetition_penalty": 1.5}]
    rows = {
        "prompt": ["a", "b", "c"],
        "sampling_params": [each and json.dumps(each) for each in own],
    }
    run(*(tmp_path, engines, rows), model={"name": str(model)}, sampling={"max_tokens": 3})
    assert names(engines) == {DRAWS, FILTERS, EDITS}
