"""``batchinfer bench``: its options, the prompts it reads, and its report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.builders.engine import build_engine
from batchinfer.cli.bench import run_bench
from batchinfer.cli.commands import main
from batchinfer.config.options import BenchOptions
from batchinfer.errors import DataError, UsageError
from tests.encoders import make_encoder
from tests.models import make_text_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model"))


def bench(
    model: Path, column: str, values: Any, show: Any = lambda line: None, task: str = "auto"
) -> dict[str, Any]:
    dataset = model / "prompts.parquet"
    pq.write_table(pa.table({column: values}), dataset)
    options = BenchOptions(
        str(model),
        *(1, 2, 3),  # lengths of prompts and answers, number of prompts
        num_kv_blocks=64,
        dataset=dataset,
        task=task,
    )
    return run_bench(options, show=show)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("prompt", ["one", "two"]),
        ("text", pa.array(["one", "one"]).dictionary_encode()),
        ("token_ids", pa.array([[5, 6], [7]], pa.list_(pa.int32()))),
    ],
)
def test_prompts_of_a_dataset(model: Path, column: str, values: Any) -> None:
    result = bench(model, column, values)
    assert (result["num_requests"], result["num_errors"]) == (2, 0)
    assert result["tokens"]["output"] == 4


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("prompt", ["one", None], "row 1: prompt is null"),
        ("token_ids", [[5], [6, None]], "row 1: token_ids holds a null"),
        (
            "token_ids",
            [[5], [6, 99_999]],
            "row 1: token id 99999 is out of vocabulary; the model's",
        ),
        ("token_ids", [[-1]], "row 0: token id -1 is out of vocabulary"),
        ("prompt", [5, 6], "column prompt is int64; it must be string or list<int32>"),
        ("text", pa.array([b"\xff"]).view(pa.string()), "row 0: text is not valid UTF-8"),
        ("answer", ["one"], "has no prompt column"),
    ],
)
def test_a_bad_prompt_is_named(model: Path, column: str, values: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        bench(model, column, values)


def test_bench_shows_no_bars_in_a_file(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench(model, "prompt", ["one", "two"])
    assert "prompts/s" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pa.array([[5] * 2000, [6] * 2000]), "none of the 2 prompts could be run; the first: "),
        (pa.array([], pa.list_(pa.int32())), "has no rows"),
    ],
)
def test_bench_without_prompts_fails(model: Path, values: pa.Array, message: str) -> None:
    with pytest.raises(DataError, match=message):
        bench(model, "token_ids", values)


def test_prompts_that_cannot_be_run_are_counted(model: Path) -> None:
    result = bench(model, "token_ids", [[5, 6], [7] * 2000])
    assert (result["num_requests"], result["num_errors"]) == (2, 1)


def test_options_of_bench_reach_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "result.json"
    arguments = f"""bench --model {model} --input-len 5 --output-len 3 --num-prompts 4 --n 2
        --dtype bfloat16 --num-kv-blocks 33 --block-size 8 --max-num-seqs 6
        --max-num-batched-tokens 40 --output-json {result}"""
    engines: list[Any] = []

    def build(*settings: Any, **options: Any) -> Any:
        engines.append(settings)
        return build_engine(*settings, **options)

    monkeypatch.setattr("batchinfer.llm.llm.build_engine", build)
    monkeypatch.setattr(sys, "argv", ["batchinfer", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    found = json.loads(result.read_text())
    assert found["num_requests"] == 4
    assert (found["tokens"]["prompt"], found["tokens"]["output"]) == (4 * 5, 4 * 2 * 3)
    [(model_config, engine)] = engines
    assert model_config.dtype == "bfloat16"
    assert (engine.num_kv_blocks, engine.block_size) == (33, 8)
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (6, 40)


def test_default_prompts_leave_room_for_answers(model: Path) -> None:
    longest = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    options = BenchOptions(str(model), output_len=2, num_prompts=1, num_kv_blocks=256)
    tokens = run_bench(options, show=lambda line: None)["tokens"]
    assert (tokens["prompt"], tokens["output"]) == (min(1024, longest - 2), 2)


def test_default_prompts_of_embeddings_fill_the_model_length(tmp_path: Path) -> None:
    encoder = make_encoder(tmp_path, "bert", max_length=40)
    options = BenchOptions(str(encoder), output_len=128, num_prompts=1)
    assert run_bench(options, show=lambda line: None)["tokens"]["prompt"] == 39


def test_bench_shows_the_cost_of_deterministic(model: Path) -> None:
    shown: list[str] = []
    options = BenchOptions(
        str(model), input_len=4, output_len=2, num_prompts=2, num_kv_blocks=64, deterministic=True
    )
    result = run_bench(options, show=shown.append)
    ratio = result["deterministic"]["requests_per_s"] / result["requests_per_s"]
    assert result["deterministic_ratio"] == ratio
    assert (
        shown[-1]
        == f"engine.deterministic: true reaches {ratio:.2f} times the requests/s of the default"
    )


@pytest.mark.parametrize("missing", ["model", "dataset"])
def test_bench_finds_missing_files_before_it_imports_torch(tmp_path: Path, missing: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "prompts.parquet").touch()
    model = tmp_path / "nope" if missing == "model" else tmp_path
    program = f"""
import sys
from batchinfer.cli.commands import main
sys.argv = ["batchinfer", "bench", "--model", "{model}"]
sys.argv += ["--dataset", "{tmp_path / "prompts.parquet"}"]
sys.modules["torch"] = None
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    expected = {"model": (5, f"no folder {model}"), "dataset": (4, "prompts.parquet cannot be re")}
    assert done.returncode == expected[missing][0], done.stderr
    assert expected[missing][1] in done.stderr


def test_bench_of_embeddings_counts_rows(tmp_path: Path, model: Path) -> None:
    encoder, lines = make_encoder(tmp_path, "bert"), list[str]()
    result = bench(encoder, "prompt", ["a b", "of the and", "a " * 60], lines.append)
    assert (result["num_requests"], result["num_errors"]) == (3, 1)
    assert (result["tokens"]["prompt"], result["tokens"]["output"]) == (4 + 5, 0)
    assert "rows/s" in lines[0]
    result = bench(model, "prompt", ["one", "two"], lines.append, task="embed")
    assert (result["tokens"]["prompt"], result["tokens"]["output"]) == (6, 0)
    with pytest.raises(UsageError, match="--task embd: must be one of auto, generate"):
        bench(model, "prompt", ["one"], task="embd")
