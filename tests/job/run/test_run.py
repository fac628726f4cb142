"""Whole jobs on an engine that answers with the prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import (
    DataError,
    DeviceError,
    ExitCode,
    LockedError,
    ModelError,
    StorageError,
    UsageError,
)
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.run.run_job import run_job
from tests.faults.hostile_texts import HostileBuild
from tests.job.datasets import strings, write_parquet
from tests.job.fakes import FakeBuild, FakeBuilt, job
from tests.job.run.outputs import numbered, output, snapshot, summary, tree

MESSAGES = [{"role": "user", "content": "{{ prompt }}"}]
LONG = "x" * 300  # the fake model takes up to 256 tokens


def test_warm_up_compiles_the_sampling_of_the_job(tmp_path: Path, build: FakeBuild) -> None:
    events: list[Any] = []
    build.before_step = events.append

    def build_on_gpu(*args: Any, **kwargs: Any) -> FakeBuilt:
        return replace(
            build(*args, **kwargs),
            warm_up=lambda params, own: events.append(([one.top_p for one in params], len(own))),
        )

    numbered(tmp_path, 2)
    run_job(job(tmp_path, sampling={"top_p": 0.9}), build=build_on_gpu)
    assert events[:2] == [([0.9], 0), 0]


def test_warm_up_compiles_the_sampling_of_rows(tmp_path: Path, build: FakeBuild) -> None:
    owned: list[Any] = []

    def build_on_gpu(*args: Any, **kwargs: Any) -> FakeBuilt:
        return replace(
            build(*args, **kwargs), warm_up=lambda params, own: owned.append("top_k" in own)
        )

    columns = {"prompt": ["one", "two"], "sampling_params": [None, '{"top_k": 3}']}
    write_parquet(tmp_path / "in" / "x.parquet", columns)
    run_job(job(tmp_path), build=build_on_gpu)
    assert owned == [True]


def test_output_is_in_input_order_with_kept_columns(tmp_path: Path, build: FakeBuild) -> None:
    prompts = numbered(tmp_path)
    assert run_job(job(tmp_path), build=build) is ExitCode.OK
    names = [path.name for path in sorted((tmp_path / "out" / "data").iterdir())]
    assert names == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    table = output(tmp_path)
    assert table["row_id"].to_pylist() == list(range(25))
    assert table["n"].to_pylist() == list(range(25))
    assert table["prompt"].to_pylist() == prompts
    assert table["generated_text"].to_pylist() == [prompt[:8] for prompt in prompts]
    assert table["status"].to_pylist() == ["ok"] * 25
    assert table["error"].null_count == 25
    assert table["num_prompt_tokens"].to_pylist() == [len(prompt) for prompt in prompts]
    first = table["outputs"][0].as_py()
    assert first == [
        {
            "index": 0,
            "text": "0 is the",
            "finish_reason": "length",
            "stop_reason": None,
            "num_tokens": 8,
            "cumulative_logprob": -8.0,
        }
    ]
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_data_is_the_same_in_every_run(tmp_path: Path, build: FakeBuild) -> None:
    numbered(tmp_path)
    run_job(job(tmp_path), build=build)
    before = snapshot(tmp_path)
    run_job(job(tmp_path, engine={"order": "input"}), build=FakeBuild(40, 3), overwrite=True)
    after = snapshot(tmp_path)
    assert {name: data for name, (_, data) in after.items()} == {
        name: data for name, (_, data) in before.items()
    }


def test_file_metadata(tmp_path: Path, build: FakeBuild) -> None:
    numbered(tmp_path)
    run_job(job(tmp_path), build=build)
    metadata = pq.read_schema(tmp_path / "out" / "data" / "part-00000.parquet").metadata
    assert metadata[b"batchinfer.model"] == b"echo"
    assert json.loads(metadata[b"batchinfer.sampling"])["max_tokens"] == 8
    assert "torch" in json.loads(metadata[b"batchinfer.versions"])
    assert metadata[b"batchinfer.fingerprint"].decode() == summary(tmp_path)["fingerprint"]


def test_file_metadata_does_not_contain_the_model_path(tmp_path: Path, build: FakeBuild) -> None:
    """Moving a project must not change the bytes of its parts."""
    numbered(tmp_path)
    model = tmp_path / "models" / "small"
    model.mkdir(parents=True)
    run_job(job(tmp_path, model={"name": str(model)}), build=build)
    metadata = pq.read_schema(tmp_path / "out" / "data" / "part-00000.parquet").metadata
    assert metadata[b"batchinfer.model"] == b"small"


def test_bad_rows_get_error_codes(tmp_path: Path, build: FakeBuild) -> None:
    bad = {20: (b"", "empty_prompt"), 40: (None, "empty_prompt"), 60: (b"\xff", "invalid_utf8")}
    bad |= {80: (LONG.encode(), "prompt_too_long"), 99: (b"  ", "empty_prompt")}
    prompts = [b"row %d" % row for row in range(100)]
    values = [bad[row][0] if row in bad else prompts[row] for row in range(100)]
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": strings(values)})
    assert run_job(job(tmp_path, errors={"max_error_rate": 0.05}), build=build) is ExitCode.OK
    table = output(tmp_path)
    codes = {row: e["code"] for row, e in enumerate(table["error"].to_pylist()) if e}
    assert codes == {row: code for row, (_, code) in bad.items()}
    for row, text in enumerate(table["generated_text"].to_pylist()):
        assert text == (None if row in bad else prompts[row].decode())
    assert table["status"].to_pylist().count("error") == 5
    assert table["outputs"][20].as_py() == []
    assert table["prompt"][60].as_py() == "\N{REPLACEMENT CHARACTER}"
    assert summary(tmp_path)["rows"] == {
        "total": 100,
        "ok": 95,
        "error": 5,
        "reused": 0,
        "error_codes": {"empty_prompt": 3, "invalid_utf8": 1, "prompt_too_long": 1},
        "control_text": 0,
        "first_errors": [
            {"row_id": row, "id": None, "code": code} for row, code in sorted(codes.items())
        ],
    }


def test_too_many_errors_withhold_success(
    tmp_path: Path, build: FakeBuild, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["a", "", "c", "d"]})
    spec = job(tmp_path, errors={"max_error_rate": 0.2})
    for _ in range(2):
        assert run_job(spec, build=build, quiet=True) is ExitCode.TOO_MANY_ROW_ERRORS
        assert "1 of 4 rows failed" in capsys.readouterr().err
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert output(tmp_path).num_rows == 4
    accepting = job(tmp_path, errors={"max_error_rate": 0.25})
    assert run_job(accepting, build=build) is ExitCode.OK
    assert (tmp_path / "out" / "_SUCCESS").exists()
    assert build.count == 1


def test_decoder_failure_is_a_row_error(tmp_path: Path) -> None:
    def fail_at_letters(tokenizer: dict[str, Any]) -> None:
        one = {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": ""}
        tokenizer["decoder"] = {"type": "Sequence", "decoders": [{"type": "Fuse"}, one]}

    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["good", "x" * 60, "well"]})
    spec = job(tmp_path, sampling={"max_tokens": 100}, errors={"max_error_rate": 0.9})

    assert run_job(spec, build=HostileBuild(fail_at_letters), quiet=True) is ExitCode.OK  # type: ignore[arg-type]

    rows = polars.read_parquet(tmp_path / "out" / "data" / "*.parquet")
    assert rows["generated_text"].to_list() == ["good", None, "well"]
    error = rows["error"][1]
    assert error["code"] == "tokenizer_error"
    assert error["message"].startswith("the tokenizer failed to decode the output: Onig")


def test_control_tokens_in_row_text_are_counted(tmp_path: Path, build: FakeBuild) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["a<eos>b", "c"]})
    assert run_job(job(tmp_path), build=build) is ExitCode.OK
    assert summary(tmp_path)["rows"]["control_text"] == 1
    assert output(tmp_path)["generated_text"].to_pylist() == ["a<eos>b", "c"]


def test_empty_dataset_needs_no_model(
    tmp_path: Path, build: FakeBuild, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": pa.array([], pa.string())})
    assert run_job(job(tmp_path), build=build) is ExitCode.OK
    assert "the input has no rows\n" in capsys.readouterr().err
    assert output(tmp_path).num_rows == 0
    assert build.count == 0
    assert summary(tmp_path)["rows"]["total"] == 0
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_second_run_has_nothing_to_do(
    tmp_path: Path, build: FakeBuild, capsys: pytest.CaptureFixture[str]
) -> None:
    numbered(tmp_path)
    run_job(job(tmp_path), build=build)
    before = snapshot(tmp_path)
    capsys.readouterr()
    assert run_job(job(tmp_path), build=build) is ExitCode.OK
    assert "nothing to do" in capsys.readouterr().out
    assert snapshot(tmp_path) == before
    assert build.count == 1


def test_nothing_to_do_needs_no_torch(tmp_path: Path, build: FakeBuild) -> None:
    numbered(tmp_path)
    spec = job(tmp_path)
    run_job(spec, build=build)
    script = (
        "import sys; from batchinfer.job.run.run_job import run_job\n"
        "from batchinfer.job.spec.spec import JobSpec\n"
        "assert run_job(JobSpec.model_validate_json(sys.argv[1])) == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    arguments = [sys.executable, "-c", script, spec.model_dump_json(by_alias=True)]
    assert b"nothing to do" in subprocess.run(arguments, check=True, capture_output=True).stdout


def test_finished_job_is_only_read(
    tmp_path: Path, build: FakeBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(tmp_path)
    run_job(job(tmp_path), build=build)
    before = tree(tmp_path)

    def read_only(self: OutputDir) -> None:
        raise StorageError("read-only")

    monkeypatch.setattr(OutputDir, "locked", read_only)
    assert run_job(job(tmp_path), build=build) is ExitCode.OK
    assert tree(tmp_path) == before
    with pytest.raises(LockedError, match=r"sampling\.n was 1 and is now 2"):
        run_job(job(tmp_path, sampling={"n": 2}), build=build)


def cannot_build(*_: object, log: Callable[[str], None], **__: object) -> FakeBuilt:
    raise DeviceError("no such device")


@pytest.mark.parametrize(
    ("sections", "broken", "error"),
    [
        ({}, cannot_build, DeviceError),
        ({"sampling": {"stop_token_ids": [5000]}}, FakeBuild(), UsageError),
        (
            {"prompt": {"column": None, "messages": MESSAGES, "chat_template": "auto"}},
            FakeBuild(),
            ModelError,
        ),
    ],
)
def test_output_is_overwritten_only_by_a_job_that_can_run(
    tmp_path: Path,
    build: FakeBuild,
    sections: dict[str, Any],
    broken: Callable[..., FakeBuilt],
    error: type[Exception],
) -> None:
    numbered(tmp_path)
    run_job(job(tmp_path), build=build)
    before = tree(tmp_path)
    with pytest.raises(error):
        run_job(job(tmp_path, **sections), build=broken, overwrite=True)
    assert tree(tmp_path) == before
    assert run_job(job(tmp_path), build=build) is ExitCode.OK
    assert build.count == 1


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"prompt": {"column": "nope"}}, DataError),
        ({"prompt": {"column": None, "template": "{{ nope }}"}}, UsageError),
        ({"input": {"keep_columns": ["nope"]}}, DataError),
        ({"input": {"id_column": "lists"}}, DataError),
        ({"prompt": {"column": "prompt", "system": "{{ nope }}"}}, UsageError),
        ({"output": {"rename": {"prompt": "status"}}}, UsageError),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(
    tmp_path: Path, build: FakeBuild, sections: dict[str, Any], error: type[Exception]
) -> None:
    columns = {"prompt": ["a", "b"], "lists": [[1], [2]]}
    write_parquet(tmp_path / "in" / "x.parquet", columns)
    with pytest.raises(error):
        run_job(job(tmp_path, **sections), build=build)
    assert build.count == 0


def test_columns_of_all_types_are_kept(tmp_path: Path, build: FakeBuild) -> None:
    columns = {
        "prompt": pa.array(["a", "b", None]).dictionary_encode(),
        "large": pa.array(["l", None, "ä"], pa.large_string()),
        "view": pa.array(["v", None, "w"], pa.string_view()),
        "list": pa.array([["x"], [], None]),
        "struct": pa.array([{"a": 1, "b": ["c"]}, None, {"a": None, "b": []}]),
        "when": pa.array([1000, 2000, None], pa.timestamp("ns", "UTC")),
        "price": pa.array([None, 1, 2], pa.decimal128(10, 2)),
        "binary": pa.array([b"\xff", None, b""]),
        "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int32())),
        "fixed": pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2)),
    }
    path = write_parquet(tmp_path / "in" / "x.parquet", columns, rows_per_group=2)
    spec = job(tmp_path, errors={"max_error_rate": 1})
    assert run_job(spec, build=build) is ExitCode.OK
    kept, original = output(tmp_path).select(list(columns)), pq.read_table(path)
    assert kept.schema == original.schema
    assert kept.to_pylist() == original.to_pylist()
    assert output(tmp_path)["generated_text"].to_pylist() == ["a", "b", None]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.binary()])
def test_prompts_of_every_string_type(tmp_path: Path, build: FakeBuild, kind: pa.DataType) -> None:
    write_parquet(
        tmp_path / "in" / "x.parquet", {"prompt": pa.array([b"hi"], pa.binary()).cast(kind)}
    )
    assert run_job(job(tmp_path), build=build) is ExitCode.OK
    assert output(tmp_path)["generated_text"].to_pylist() == ["hi"]


def test_sampling_params_of_every_column_type(tmp_path: Path, build: FakeBuild) -> None:
    columns = {
        "temperature": pa.array([Decimal("0.00"), None], pa.decimal128(4, 2)),
        "top_p": pa.array([None, 1_500], pa.timestamp("ns")),
    }
    params = pa.StructArray.from_arrays(list(columns.values()), list(columns))
    path = tmp_path / "in" / "x.parquet"
    write_parquet(path, {"prompt": ["good", "bad"], "sampling_params": params})
    assert run_job(job(tmp_path, errors={"max_error_rate": 1}), build=build) is ExitCode.OK
    texts, errors = (output(tmp_path)[name].to_pylist() for name in ("generated_text", "error"))
    assert texts == ["good", None]
    assert errors[1]["code"] == "bad_sampling_params"


def test_messages_of_a_run(
    tmp_path: Path, build: FakeBuild, capsys: pytest.CaptureFixture[str]
) -> None:
    numbered(tmp_path)
    run_job(job(tmp_path), build=build)
    shown = capsys.readouterr().out
    for word in (
        "25 ok, 0 failed",
        "200 in answers",
        "128 blocks of 4",
        "waste",
        "sharing",
        "files",
    ):
        assert word in shown
    run_job(job(tmp_path), build=build, overwrite=True, quiet=True)
    assert capsys.readouterr() == ("", "")
    log = tmp_path / "out" / "_batchinfer" / "logs" / "run-00001.log"
    assert log.read_text() == "a table of memory\n"
