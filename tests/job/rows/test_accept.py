"""Jobs with ``accept`` keep the same samples however they are run, and count every sample."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.console.table import plain
from batchinfer.errors import ExitCode, UsageError
from batchinfer.job.run.reporter import summary_facts
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from batchinfer.job.spec.spec import JobSpec
from tests.engine.invariants import check_scheduler
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, FakeBuilt, drawn, job
from tests.models import make_text_model

REGEX = "^[^a-e]*[f-m]"
KINDS = ("requests", "steps")
BAD = ['{"regex": 1}', '{"beam_width": 2}', '{"n": 17}']
CELLS = [None, None, '{"n": 2}', '{"seed": 5}', None, None, None, *BAD]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("accepting")
    make_text_model(path / "model")
    prompts = [f"Row {at} " * (1 + at % 3) for at in range(len(CELLS))]
    pq.write_table(pa.table({"prompt": prompts, "sampling_params": CELLS}), path / "in.parquet")
    return path


def run(folder: Path, name: str, accept: str, **changes: Any) -> tuple[list[Any], dict[str, Any]]:
    """Run a job; return its output rows and its summary."""
    text = (
        "model: {name: model, dtype: float32}\ninput: {path: in.parquet}\n"
        "prompt: {chat_template: none}\nsampling: {max_tokens: 6, seed: 3}\n"
        f"{accept}\nengine: {{num_kv_blocks: 200, max_num_seqs: 16}}\n"
        f"output: {{path: {name}, rows_per_part: 3}}\nerrors: {{max_error_rate: 0.5}}\n"
    )
    job = folder / f"{name}.yaml"
    job.write_text(text)
    overrides = [f"{key}={value}" for key, value in changes.items()]
    assert run_job(load_job(job, overrides=overrides), quiet=True) is ExitCode.OK
    rows = pq.read_table(folder / name / "data").to_pylist()
    return rows, json.loads((folder / name / "summary.json").read_text())


def test_accept_keeps_the_first_passing_samples_and_counts_all(folder: Path) -> None:
    everything, _ = run(folder, "all", "", **{"sampling.n": 16})
    rows, summary = run(folder, "some", f"accept: {{regex: '{REGEX}', k: 3, dedup: true}}")
    kept = 0
    for row, whole, cell in zip(rows, everything, CELLS, strict=True):
        if cell in BAD:
            assert row["error"]["code"] == "bad_sampling_params"
            continue
        assert row["status"] == "ok"
        wanted = 2 if cell == CELLS[2] else 3
        candidates = whole["outputs"]
        if cell == CELLS[2]:  # the row's n is the number of samples to keep, not to draw
            candidates = [one for one in row["outputs"] if re.search(REGEX, one["text"])]
        texts = [one["text"] for one in candidates]
        passing = [
            one
            for at, one in enumerate(candidates)
            if re.search(REGEX, one["text"]) and texts.index(one["text"]) == at
        ]
        assert row["outputs"] == passing[:wanted]
        assert row["generated_text"] == (passing[0]["text"] if passing else None)
        assert row["num_output_tokens"] == sum(one["num_tokens"] for one in row["outputs"])
        kept += len(row["outputs"])
    counts = summary["accept"]
    assert counts["samples_accepted"] == kept > 0
    assert counts["samples_rejected"] > 0
    assert counts["samples_tried"] == sum(counts.values()) - counts["samples_tried"]
    assert counts["samples_tried"] < 7 * 16
    requests = pq.read_table(folder / "some" / "stats" / "requests.parquet").to_pylist()
    assert sum(one["samples_tried"] for one in requests) == counts["samples_tried"]


def test_accept_does_not_depend_on_batching(folder: Path) -> None:
    accept = f"accept: {{regex: '{REGEX}', k: 3}}"
    first, summary = run(folder, "first", accept)
    tight = {"engine.num_kv_blocks": 6, "engine.max_num_seqs": 4, "engine.order": "input"}
    second, other = run(folder, "second", accept, **tight)
    assert first == second
    assert summary["accept"] == other["accept"]


@pytest.mark.parametrize("regex", ["", "b", "never"])
def test_accept_frees_all_blocks(tmp_path: Path, regex: str) -> None:
    engines = []

    class Build(FakeBuild):
        def __call__(self, *arguments: Any, **options: Any) -> FakeBuilt:
            built = super().__call__(*arguments, **options)
            engines.append(built.engine)
            return built

    prompts = ["a", "ab", "a longer one", "", "x" * 30]
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": prompts})
    fields = job(tmp_path, sampling={"max_tokens": 6, "temperature": 1.0})
    accept = {"regex": regex, "k": 2, "max_tries": 9, "dedup": True}
    errors = {"max_error_rate": 1.0}
    spec = JobSpec.model_validate(
        {**fields.model_dump(by_alias=True), "accept": accept, "errors": errors}
    )
    assert run_job(spec, build=Build(16, next_token=drawn), quiet=True) is ExitCode.OK
    pool = engines[0].scheduler.pool
    assert pool.num_used == pool.num_shared == 0
    assert pool.num_available == pool.num_blocks
    check_scheduler(engines[0].scheduler)


def test_rows_without_a_passing_sample_are_not_errors(folder: Path) -> None:
    rows, summary = run(folder, "none", "accept: {regex: nothing says this, max_tries: 5}")
    for row in rows:
        if row["status"] == "ok":
            assert (row["outputs"], row["generated_text"]) == ([], None)
    assert summary["accept"]["samples_rejected"] == summary["accept"]["samples_tried"] == 7 * 5
    lines = plain(summary_facts(summary, folder))
    assert "samples  0 kept of 35 drawn; 35 did not pass" in list(lines)


@pytest.mark.parametrize("num_blocks", [128, 12])
def test_a_prompt_counts_once_for_several_rounds_of_samples(
    tmp_path: Path, num_blocks: int
) -> None:
    prompts = ["a prompt of some length", "equal", "equal", "", "another"]
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": prompts})
    fields = job(tmp_path, sampling={"temperature": 0.0}, errors={"max_error_rate": 1.0})
    accept = {"regex": "never", "max_tries": 9}
    spec = JobSpec.model_validate({**fields.model_dump(by_alias=True), "accept": accept})
    assert run_job(spec, build=FakeBuild(num_blocks), quiet=True) is ExitCode.OK
    out = tmp_path / "out"
    requests, steps = (pq.read_table(out / "stats" / f"{name}.parquet") for name in KINDS)
    expected = [len(prompt) for prompt in prompts if prompt]
    assert requests["prompt_tokens"].to_pylist() == expected
    tokens = json.loads((out / "summary.json").read_text())["tokens"]
    assert tokens["prompt"] == sum(expected) == tokens["prompt_computed"] + tokens["prompt_cached"]
    totals = {
        name: sum(steps[name].to_pylist()) for name in ("prefill_tokens", "recomputed_tokens")
    }
    assert totals["prefill_tokens"] == tokens["prompt_computed"] + tokens["recomputed"]
    assert (
        totals["recomputed_tokens"]
        == tokens["recomputed"]
        == sum(requests["recomputed_tokens"].to_pylist())
    )
    assert tokens["lost"] == 0
    assert requests["deduplicated"].to_pylist() == [0, 0, 1, 0]
    assert requests["recomputed_tokens"].to_pylist()[2] == 0


@pytest.mark.parametrize(
    ("accept", "changes", "message"),
    [
        ("accept: {schema: {type: strnig}}", {}, "line 5: accept: schema is not valid"),
        (
            "accept: {regex: 'a(?=b)'}",
            {},
            "line 5: accept.regex is not valid: invalid perl operator",
        ),
        ("accept: {kk: 3}", {}, "unknown key accept.kk; did you mean k"),
        ("accept: {k: 2}", {"sampling.n": 3}, "accept.k and sampling.n both say how many"),
        ("accept: {max_tries: 2}", {"sampling.n": 3}, "accept.max_tries is less than sampling.n"),
    ],
)
def test_mistakes_in_accept_are_refused_before_the_model_loads(
    folder: Path, accept: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        run(folder, "wrong", accept, **changes)
    assert message in str(caught.value)
