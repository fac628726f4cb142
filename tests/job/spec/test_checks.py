"""Job files are refused if keys contradict each other or the files on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchinfer.config import EngineConfig
from batchinfer.errors import UsageError
from batchinfer.job.spec.load import load_job
from batchinfer.job.spec.referenced_files import read_preset, shipped_presets
from batchinfer.job.spec.spec import JobSpec
from tests.job.job_files import write_job


def load(folder: Path, *overrides: str, output: str | None = None) -> JobSpec:
    return load_job(write_job(folder), overrides=overrides, output=output)


def complaint(folder: Path, *overrides: str, output: str | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        load(folder, *overrides, output=output)
    return str(caught.value).replace(f"{folder}/", "")


# Adapters


def test_adapters_need_rows_and_rows_need_adapters(tmp_path: Path) -> None:
    found = complaint(tmp_path, "prompt.adapter_column=a")
    assert "prompt.adapter_column is set, but model.adapters is empty" in found
    found = complaint(tmp_path, "model={name: m, adapters: {a: b}}")
    assert "model.adapters are set, but no row uses them" in found
    adapters = "model={name: m, adapters: {short: ./b, c: o/r}}"
    found = complaint(tmp_path, adapters, "prompt.adapter=shrt")
    assert 'prompt.adapter: model.adapters has no "shrt"; did you mean short?' in found
    found = complaint(tmp_path, adapters, "prompt.adapter=c", "prompt.adapter_column=x")
    assert "give adapter (for all rows) or adapter_column, not both" in found
    assert load(tmp_path, adapters, "prompt.adapter=c").prompt.adapter == "c"
    spec = load(tmp_path, "model={name: m, adapters: {a: ./b, c: o/r}}", "prompt.adapter_column=a")
    assert spec.model.adapters == {"a": str(tmp_path / "b"), "c": "o/r"}


# Output paths


@pytest.mark.parametrize(
    ("input_path", "output_path", "says"),
    [
        ("in", "in/out", "is inside the input folder"),
        ("in/**/*.parquet", "in/out", "is inside the input folder"),
        ("[x, in]", "in/out", "is inside the input folder"),
        ("s3://lake/in/", "s3://lake/in/out", "is inside the input folder s3://lake/in"),
        ("s3://lake/out/x.parquet", "s3://lake/out/", "contains the input"),
        ("x", "s3://lake", "the root folder; choose a folder below it"),
        ("x", "s3://lake/a/../b", "an object store has no folder named .."),
    ],
)
def test_output_that_overlaps_the_input_is_refused(
    tmp_path: Path, input_path: str, output_path: str, says: str
) -> None:
    value = input_path if input_path.startswith("[") else f"'{input_path}'"
    found = complaint(tmp_path, f"input.path={value}", f"output.path={output_path}")
    assert found.startswith(f"--set output.path={output_path}: output.path ")
    assert says in found


@pytest.mark.parametrize(
    ("input_path", "output_path"),
    [("in/x.parquet", "in/out"), ("in/*/x.parquet", "in/out"), ("in", "inner")],
)
def test_input_and_output_in_sibling_folders_are_accepted(
    tmp_path: Path, input_path: str, output_path: str
) -> None:
    spec = load(tmp_path, f"input.path='{input_path}'", f"output.path={output_path}")
    assert spec.output.path == str(tmp_path / output_path)


@pytest.mark.parametrize("root", ["/", "//", "/../.."])
def test_root_folder_as_output_is_refused(tmp_path: Path, root: str) -> None:
    assert "the root folder; choose a folder below it" in complaint(tmp_path, f"output.path={root}")
    assert complaint(tmp_path, output=root).startswith("--output: output.path is /")


# The model


@pytest.mark.parametrize("name", ["./model", "model"])
def test_a_local_folder_has_no_revision(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    found = complaint(tmp_path, f"model.name={name}", "model.revision=main")
    assert "model.revision: model.name is a local folder, which has no revisions" in found
    assert load(tmp_path, "model.name=org/model", "model.revision=main").model.revision == "main"


# The prompt


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fine\n{% if %}", "is not a valid Jinja2 template (line 2)"),
        (b"{{ ''.__class__ }}", "private attribute __class__"),
        (b"\xff", "is not a UTF-8 text file; save it as UTF-8"),
    ],
)
def test_a_chat_template_file_is_compiled(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "chat.jinja").write_bytes(content)
    found = complaint(tmp_path, "prompt.chat_template=chat.jinja")
    assert "prompt.chat_template: chat.jinja " in found
    assert message in found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "tools.json must hold a list of tools, "),
        (b"[{", "tools.json is not JSON: Expecting"),
    ],
)
def test_a_tools_file_is_checked(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tools.json").write_bytes(content)
    found = complaint(tmp_path, "prompt.tools=tools.json")
    assert found.startswith(f"--set prompt.tools=tools.json: prompt.tools: {message}")


@pytest.mark.parametrize("key", ["prompt.tools", "prompt.chat_template"])
def test_pipe_instead_of_a_file_is_refused_without_blocking(tmp_path: Path, key: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert f"{key}: there is no file pipe" in complaint(tmp_path, f"{key}=pipe")


# Names of output columns


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["output.rename={a: b}", "input.keep_columns=[a, b]"],
            'output.rename.a: "b" is also a kept input column',
        ),
        (["output.rename={c: d}", "input.keep_columns=[a]"], "output.rename.c: the column is not"),
        (["input.keep_columns=[status]"], "set output.rename: {status: input_status}"),
    ],
)
def test_colliding_column_names_are_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    assert message in complaint(tmp_path, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["output.rename={a: prompt}"],
        ["output.rename={status: a}", "input.keep_columns=[status]"],
        ["output.rename={a: b, b: a}", "input.keep_columns=[a, b]"],
    ],
)
def test_column_names_without_collision_are_accepted(tmp_path: Path, overrides: list[str]) -> None:
    load(tmp_path, *overrides)


def test_cluster_without_workers_is_refused(tmp_path: Path) -> None:
    found = complaint(tmp_path, "scale.cluster=auto")
    assert "cluster needs workers; set workers to a number or auto" in found


@pytest.mark.parametrize("name", shipped_presets())
def test_every_shipped_preset_is_a_valid_engine(name: str, tmp_path: Path) -> None:
    text, source = read_preset(name, tmp_path)
    engine = EngineConfig(**text.data)
    assert engine.device == ("cpu" if name == "cpu" else "cuda")
    assert name in source


@pytest.mark.parametrize("name", ["h300", "no/such.yaml", "nul\0", "", "x" * 5000])
def test_an_unknown_preset_lists_the_shipped_ones(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="the shipped presets are: a100-80g, cpu, h100, h200, l40s, rtx-4090"
    ):
        read_preset(name, tmp_path)


def test_a_preset_must_be_keys_and_values(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("- 1\n")
    with pytest.raises(UsageError, match=r"mine\.yaml: a preset must consist of keys"):
        read_preset("mine.yaml", tmp_path)
