"""Equal rows are computed once; the output equals that of computing each row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.errors import ExitCode
from batchinfer.job.run import dedup
from batchinfer.job.run.dedup import RequestDeduplicator
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job
from tests.job.output.test_resume import Build, check_sums, fail_at, stop_at
from tests.models import make_text_model

PROMPTS = ["a", "ab", "abc", "Row 1 asks", "Row 2 asks"]
CELLS = [None, '{"max_tokens": 3}', '{"seed": 1}', '{"temperature": 1.0}', '{"n": 2}']
PARAMS = [
    None,
    '{"n": 2}',
    '{"seed": 4, "logprobs": 3}',
    '{"max_tokens": 3, "prompt_logprobs": 1}',
    '{"beam_width": 3, "n": 2}',
    '{"temperature": 0.9}',
    '{"temperature": 0.9, "seed": 4}',
    '{"repetition_penalty": 1.3, "stop": "e"}',
    '{"logit_bias": {"7": 4.0}}',
    '{"structured_outputs": {"regex": "[a-f]{2,9}"}}',
]


class Planned(Build):
    """Records the prefix of each prompt that later rows reuse."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        built = super().__call__(*arguments, **options)
        self.later: dict[int, int] = {}
        add = built.engine.add_request

        def add_and_note(request: Any) -> None:
            self.later[request.row_id] = request.reused_prefix_len
            add(request)

        built.engine.add_request = add_and_note
        return built


def summary(out: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((out / "summary.json").read_bytes())
    return data


def equal_rows(tmp_path: Path, count: int) -> JobSpec:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["the same"] * count})
    return job(tmp_path)


@settings(max_examples=12)
@given(
    rows=st.lists(st.tuples(st.sampled_from(PROMPTS), st.sampled_from(CELLS)), min_size=1),
    order=st.sampled_from(["input", "prefix"]),
    stop=st.none() | st.integers(0, 12),
)
def test_equal_rows_get_their_own_answers(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str | None]],
    order: str,
    stop: int | None,
) -> None:
    tmp_path = tmp_path_factory.mktemp("twins")
    columns = {"prompt": [prompt for prompt, _ in rows]}
    cells = pa.array([cell for _, cell in rows], pa.string())
    write_parquet(tmp_path / "in" / "x.parquet", {**columns, "sampling_params": cells})
    spec = job(tmp_path, engine={"order": order})
    first, second = Build(stop_at(-1 if stop is None else stop)), Build()
    if run_job(spec, build=first, quiet=True) is ExitCode.INTERRUPTED:
        assert run_job(spec, build=second, quiet=True) is ExitCode.OK
    found = pq.read_table(tmp_path / "out" / "data").to_pylist()
    for row, (prompt, cell) in zip(found, rows, strict=True):
        params = json.loads(cell or "{}")
        text = prompt[: params.get("max_tokens", 8)]
        assert [output["text"] for output in row["outputs"]] == [text] * params.get("n", 1)
    check_sums(tmp_path)
    requests = pq.read_table(tmp_path / "out" / "stats" / "requests.parquet")
    assert requests["row_id"].to_pylist() == list(range(len(rows)))
    saved = pc.sum(requests["deduplicated"]).as_py()
    assert summary(tmp_path / "out")["sharing"]["deduplicated_rows"] == saved
    if not second.count:
        assert saved == len(rows) - len(first.ran)
        assert len(first.ran) == len({_work(at, *row) for at, row in enumerate(rows)})


def _work(at: int, prompt: str, cell: str | None) -> tuple[object, ...]:
    """Return everything that decides a row's answer; without sampling, the seed has no effect."""
    params = json.loads(cell or "{}")
    drawn = at if params.pop("temperature", 0) else None
    params.pop("seed", None)
    return prompt, json.dumps(params), drawn


@pytest.mark.parametrize("accept", [None, {"regex": "[a-f]", "k": 2, "max_tries": 4}])
def test_deduplicated_output_equals_separate_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accept: dict[str, Any] | None
) -> None:
    make_text_model(tmp_path / "model")
    cells = [cell for cell in PARAMS * 3 if accept is None or "beam" not in (cell or "")]
    prompts = [f"Row {at % 2} asks" for at in range(len(cells))]
    write_parquet(
        tmp_path / "in" / "x.parquet",
        {"prompt": prompts, "sampling_params": pa.array(cells), "own": list(range(len(cells)))},
    )
    names = ["prompt", "token_ids", "logprobs", "prompt_logprobs"]
    spec = job(
        tmp_path,
        model={"name": str(tmp_path / "model"), "dtype": "float32"},
        sampling={"logprobs": 1, "prompt_logprobs": 0} if accept is None else {},
        engine={"num_kv_blocks": 200, "max_num_seqs": 16},
        output={"include": names if accept is None else names[:1], "rows_per_part": 7},
        input={"keep_columns": ["own"]},
        errors={"max_error_rate": 1.0},
    )
    if accept is not None:
        spec = JobSpec.model_validate({**spec.model_dump(by_alias=True), "accept": accept})
    assert run_job(spec, quiet=True) is ExitCode.OK
    out = tmp_path / "out"
    once, counts = pq.read_table(out / "data"), summary(out)
    assert counts["sharing"]["deduplicated_rows"] >= 5
    monkeypatch.setattr(RequestDeduplicator, "attach", lambda self, row: False)
    assert run_job(spec, overwrite=True, quiet=True) is ExitCode.OK
    assert summary(out)["sharing"]["deduplicated_rows"] == 0
    assert pq.read_table(out / "data").equals(once)
    for name in ("rows", "accept"):
        assert summary(out)[name] == counts[name]


def test_followers_share_the_error_of_their_leader(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["a", "b" * 100, "b" * 100]})
    spec = job(tmp_path, errors={"max_error_rate": 1.0})
    build = Build()
    build.num_blocks = 10
    assert run_job(spec, build=build, quiet=True) is ExitCode.OK
    good, bad, same = pq.read_table(tmp_path / "out" / "data").to_pylist()
    assert good["status"] == "ok"
    assert bad["error"]["code"] == "does_not_fit"
    assert {**same, "row_id": 1} == bad
    assert build.ran == [0, 1]


def test_rows_beyond_max_waiting_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "MAX_WAITING", 2)
    prompts = ["the same"] * 5 + [f"other {at}" for at in range(20)]
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": prompts})
    build = Build()
    assert run_job(job(tmp_path, engine={"order": "input"}), build=build, quiet=True) is ExitCode.OK
    assert build.ran == [0, *range(3, 25)]
    texts = pq.read_table(tmp_path / "out" / "data")["generated_text"].to_pylist()
    assert texts == [prompt[:8] for prompt in prompts]


@pytest.mark.parametrize("order", ["input", "prefix"])
def test_followers_reuse_no_prefix(tmp_path: Path, order: str) -> None:
    prompts = ["same prompt", *["same words"] * 3, *["last words"] * 3]
    cells = [None] * 4 + ['{"temperature": 1.0}'] * 2 + [None]
    columns = {"prompt": prompts, "sampling_params": pa.array(cells, pa.string())}
    write_parquet(tmp_path / "in" / "x.parquet", columns)
    spec = job(tmp_path, engine={"order": order})
    build = Planned()
    assert run_job(spec, build=build, quiet=True) is ExitCode.OK
    drawn = len("last words")
    assert build.later == {0: len("same "), 1: 0, 4: drawn, 5: drawn, 6: 0}


def test_followers_of_a_failed_leader_run_again(tmp_path: Path) -> None:
    spec = equal_rows(tmp_path, 30)
    with pytest.raises(MemoryError):
        run_job(spec, build=Build(fail_at(3, MemoryError())), quiet=True)
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    table = pq.read_table(tmp_path / "out" / "data")
    assert table["generated_text"].to_pylist() == ["the same"] * 30
    assert summary(tmp_path / "out")["sharing"]["deduplicated_rows"] == 29


@pytest.mark.long
@pytest.mark.parametrize("end", ["stop", "die"])
def test_followers_count_as_in_flight(tmp_path: Path, end: str) -> None:
    """Followers have the content of the row that kills the process, so they are suspects too."""
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["poison"] * 3 + list("abcdef")})
    spec = job(tmp_path, errors={"max_error_rate": 1.0})
    if end == "stop":
        assert run_job(spec, build=Build(stop_at(2)), quiet=True) is ExitCode.INTERRUPTED
        assert not list((tmp_path / "out" / "_batchinfer" / "in_flight").iterdir())
    deaths = 0
    while True:
        build = Build()

        def die_of_poison(step: int, build: Build = build) -> None:
            if not {0, 1, 2}.isdisjoint(build.ran):
                raise MemoryError

        if end == "die":
            build.before_step = die_of_poison
        try:
            assert run_job(spec, build=build, quiet=True) is ExitCode.OK
            break
        except MemoryError:
            deaths += 1
    rows = pq.read_table(tmp_path / "out" / "data").to_pylist()
    assert [row["generated_text"] for row in rows[3:]] == list("abcdef")
    if end == "stop":
        assert [row["generated_text"] for row in rows[:3]] == ["poison"] * 3
    else:
        assert {row["error"]["code"] for row in rows[:3]} == {"crashed_engine"}
        assert deaths <= 12, "14 if followers did not count as in flight"
