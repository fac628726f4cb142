"""``init`` detects columns and writes a job file that runs."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.errors import DataError, ExitCode, StorageError, UsageError
from batchinfer.job.init.job_file import InitOptions, write_job_file
from batchinfer.job.input.dataset import open_source
from batchinfer.job.output.schema import output_table
from batchinfer.job.rows.column_checks import check_prompt_columns
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.json_schema import json_schema
from batchinfer.job.spec.load import load_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.spec.yaml import read_yaml

ROOT = Path(__file__).resolve().parents[3]
TALK = [{"role": "user", "content": "Hi"}]
ANSWERED = [*TALK, {"role": "assistant", "content": "Hello"}]


def starter(folder: Path, rows: dict[str, list[Any]] | pa.Table, **options: Any) -> JobSpec:
    """Write data and a job file into ``folder``; return the checked job."""
    table = rows if isinstance(rows, pa.Table) else pa.table(rows)
    data, job = folder / "data.parquet", folder / "job.yaml"
    pq.write_table(table, data)
    write_job_file(InitOptions(str(data), job=job, force=True, **options))
    spec = load_job(job)
    source = open_source(spec.input.paths)
    check_prompt_columns(spec.prompt, source)
    output_table(source, spec)
    return spec


@pytest.mark.parametrize(
    ("rows", "key", "value"),
    [
        ({"prompt": [TALK], "chosen": [ANSWERED], "rejected": [ANSWERED]}, "column", "prompt"),
        ({"Question": ["a"], "answer": ["b"]}, "column", "Question"),
        ({"verse": ["a", "b", "c"], "kind": ["x"] * 3, "poem_id": ["p"] * 3}, "column", "verse"),
        ({"context": ["a"], "question": ["b"]}, "template", "{{ context }}\n\n{{ question }}"),
        ({"input_ids": [[1, 2]], "n": [3]}, "token_ids_column", "input_ids"),
        ({"prompt": pa.array(["a"]).dictionary_encode()}, "column", "prompt"),
    ],
)
def test_init_detects_the_prompt_column(
    tmp_path: Path, rows: dict[str, Any], key: str, value: str
) -> None:
    spec = starter(tmp_path, rows)
    assert getattr(spec.prompt, key) == value


HUB = {"bytes": b"\x89PNG", "path": None}


@pytest.mark.parametrize(
    ("rows", "images"),
    [
        ({"picture": [HUB], "question": ["a"]}, "picture"),
        ({"pages": [[HUB, HUB]], "question": ["a"]}, "pages"),
        ({"image": [b"\x89PNG"], "question": ["a"]}, "image"),
        ({"file": ["a/b.JPG", "c.png"], "question": ["a", "b"]}, "file"),
        ({"file": [b"a/b.JPG", b"c.png"], "question": ["a", "b"]}, None),
        ({"left": [HUB], "right": [HUB], "question": ["a"]}, ("left", "right")),
        ({"notes": [b"\x89PNG"], "question": ["a"]}, None),
    ],
)
def test_init_detects_image_columns(tmp_path: Path, rows: dict[str, Any], images: Any) -> None:
    spec = starter(tmp_path, rows)
    assert (spec.prompt.column, spec.prompt.images) == ("question", images)


def test_init_asks_a_question_about_rows_of_images_alone(tmp_path: Path) -> None:
    spec = starter(tmp_path, {"image": [HUB], "label": [3]})
    assert (spec.prompt.template, spec.prompt.images) == ("Describe the picture.", "image")


def test_images_must_be_in_a_column_that_can_hold_them(tmp_path: Path) -> None:
    spec = starter(tmp_path, {"question": ["a"], "n": [1]})
    source = open_source(spec.input.paths)
    for name, problem in (("n", "is int64; it must be binary"), ("m", "no column")):
        with pytest.raises(DataError, match=problem):
            check_prompt_columns(replace(spec.prompt, images=name), source)


def test_init_puts_a_shared_instruction_into_the_system_message(tmp_path: Path) -> None:
    spec = starter(tmp_path, {"instruction": ["do"] * 4, "document": ["a", "b", "c", "d"]})
    assert spec.prompt.messages == (
        {"role": "system", "content": "{{ instruction }}"},
        {"role": "user", "content": "{{ document }}"},
    )


def test_init_puts_the_input_after_the_rows_instruction(tmp_path: Path) -> None:
    spec = starter(tmp_path, {"instruction": ["a", "b"], "input": ["x", ""], "output": ["", ""]})
    assert spec.prompt.template == "{{ instruction }}{% if input %}\n\n{{ input }}{% endif %}"


def test_init_uses_a_system_column_as_system_message(tmp_path: Path) -> None:
    assert starter(tmp_path, {"system": ["a"], "prompt": ["b"]}).prompt.system == "{{ system }}"


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ({"id": ["a", "b"]}, "id"),
        ({"id": [1, 1], "uuid": ["a", "b"]}, "uuid"),
        ({"doc_id": [7, 8]}, "doc_id"),
        ({"ID": [1, 2]}, "ID"),
    ],
)
def test_init_detects_the_id_column(tmp_path: Path, ids: dict[str, Any], found: str | None) -> None:
    assert starter(tmp_path, {**ids, "prompt": ["a", "b"]}).input.id_column == found


def test_init_uses_the_named_columns(tmp_path: Path) -> None:
    rows = {"first": ["a"], "second": ["b"], "n": [1]}
    spec = starter(tmp_path, rows, prompt_column="second", id_column="n")
    assert (spec.prompt.column, spec.input.id_column) == ("second", "n")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"left": ["a"], "right": ["b"]}, ["several columns", "left (string)", "--prompt-column"]),
        (
            {"No": ["a-1", "a-2"], "what they say": ["It is broken.", "It is late."]},
            ['name the prompt column, like --prompt-column "what they say"'],
        ),
        ({"custom_id": ["a"], "url": ["b"], "body": ["c"]}, ["batchinfer run-batch -i"]),
        ({"n": [1], "x": [0.5]}, ["has no column that", "n (int64), x (double)"]),
        ({"ids": [[1, 2]]}, ["holds token ids", '--prompt-column "ids"']),
        ({"conversations": [[{"from": "human", "value": "Hi"}]]}, ["ShareGPT", "role and content"]),
    ],
)
def test_init_without_prompt_column_lists_the_columns(
    tmp_path: Path, rows: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        starter(tmp_path, rows)
    assert all(word in str(caught.value) for word in words)
    assert not (tmp_path / "job.yaml").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_column": "promt"}, "did you mean prompt"),
        ({"prompt_column": "id"}, "column id is int64; a prompt must be"),
        ({"id_column": "id"}, "row 1: .*row 0 has the same"),
    ],
)
def test_init_checks_the_named_columns(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        starter(tmp_path, {"prompt": ["a", "b"], "id": [1, 1]}, **options)


def test_init_unites_files_with_different_columns(tmp_path: Path) -> None:
    folder, file = tmp_path / "in", tmp_path / "job.yaml"
    folder.mkdir()
    for at, columns in enumerate(({"prompt": ["a"], "n": [1]}, {"prompt": ["b"]})):
        pq.write_table(pa.table(columns), folder / f"{at}.parquet")
    write_job_file(InitOptions(str(folder), job=file))
    assert load_job(file).input.schema_mode == "union"
    pq.write_table(pa.table({"prompt": ["c"], "n": ["x"]}), folder / "2.parquet")
    with pytest.raises(DataError, match=r'differ in column "n"'):
        write_job_file(InitOptions(str(folder), job=file, force=True))


def test_init_notes_conversations_that_end_with_an_answer(tmp_path: Path) -> None:
    starter(tmp_path, {"messages": [ANSWERED, TALK]})
    assert (
        "1 of the first 2 rows end with an assistant message" in (tmp_path / "job.yaml").read_text()
    )


def test_init_renames_columns_with_names_of_output_columns(tmp_path: Path) -> None:
    rows = {"prompt": ["a"], "status": [1], "input_status": [2], "row_id": [3]}
    assert starter(tmp_path, rows).output.rename == {
        "row_id": "input_row_id",
        "status": "input_status_",
    }


@given(names=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=4, unique=True))
def test_init_quotes_any_column_name(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("init")
    spec = starter(folder, {name: ["a"] for name in names}, prompt_column=names[0])
    assert spec.prompt.column == names[0]


def test_init_writes_paths_relative_to_the_job_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lake").mkdir()
    pq.write_table(pa.table({"prompt": ["a"]}), "lake/my data.parquet")
    Path("model").mkdir()
    options = InitOptions(
        "lake/my data.parquet", model="model", output="o", job=Path("jobs/a.yaml")
    )
    lines = write_job_file(options)
    spec = load_job(Path("jobs/a.yaml"))
    assert spec.input.paths == (str(tmp_path / "lake/my data.parquet"),)
    assert (spec.model.name, spec.output.path) == (str(tmp_path / "model"), str(tmp_path / "o"))
    assert lines[-1] == "run it   batchinfer run jobs/a.yaml"


def test_init_puts_the_output_outside_the_data_folder(tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    folder.mkdir()
    pq.write_table(pa.table({"prompt": ["a"]}), folder / "a.parquet")
    write_job_file(InitOptions(str(folder), job=folder / "job.yaml"))
    assert load_job(folder / "job.yaml").output.path == str(tmp_path / "out" / "job")


@pytest.mark.parametrize(
    ("architecture", "model_type", "task"),
    [
        ("BertForSequenceClassification", "bert", "classify"),
        ("Qwen3Model", "qwen3", "embed"),
        ("BertForMaskedLM", "bert", "embed"),
        ("Qwen3ForCausalLM", "qwen3", "generate"),
    ],
)
def test_init_derives_the_task_from_the_model(
    tmp_path: Path, architecture: str, model_type: str, task: str
) -> None:
    values = {"architectures": [architecture], "model_type": model_type, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(values))
    spec = starter(tmp_path, {"prompt": ["a"], "label": [1], "status": [2]}, model=str(tmp_path))
    assert spec.task == task
    labels = {"label": "input_label"} if task == "classify" else {}
    assert spec.output.rename == {**labels, "status": "input_status"}


def test_init_keeps_an_existing_job_file_without_force(tmp_path: Path) -> None:
    starter(tmp_path, {"prompt": ["a"]})
    job = tmp_path / "job.yaml"
    job.write_text("mine")
    with pytest.raises(UsageError, match="--force"):
        write_job_file(InitOptions(str(tmp_path / "data.parquet"), job=job))
    assert job.read_text() == "mine"


def test_init_raises_storage_error_if_the_file_cannot_be_written(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "data.parquet")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        write_job_file(
            InitOptions(str(tmp_path / "data.parquet"), job=tmp_path / "file" / "job.yaml")
        )


def test_init_writes_the_json_schema_next_to_the_job_file(tmp_path: Path) -> None:
    starter(tmp_path, {"prompt": ["a"]})
    first = (tmp_path / "job.yaml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=job.schema.json"
    assert json.loads((tmp_path / "job.schema.json").read_text()) == json_schema()


def test_init_job_file_for_the_quickstart_runs(tmp_path: Path) -> None:
    os.symlink(ROOT / "jobs" / "quickstart", tmp_path / "quickstart")
    data, model = (str(tmp_path / "quickstart" / name) for name in ("prompts.parquet", "model"))
    write_job_file(InitOptions(data, model=model, job=tmp_path / "job.yaml"))
    written = read_yaml(tmp_path / "job.yaml", "job.yaml").data
    assert written["prompt"]["messages"][0]["content"] == "{{ instruction }}"
    spec = load_job(tmp_path / "job.yaml", limit=4)
    assert run_job(spec, quiet=True) is ExitCode.OK
    rows = pq.read_table(tmp_path / "out" / "job" / "data" / "part-00000.parquet").to_pylist()
    assert [row["generated_text"] for row in rows] == [row["answer"] for row in rows]


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda p: p.stem)
def test_example_jobs_name_the_committed_schema(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=../configs/job.schema.json"


def test_init_says_that_a_file_without_rows_names_no_columns(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n")
    options = InitOptions(str(tmp_path / "x.jsonl"), job=tmp_path / "job.yaml")
    with pytest.raises(DataError, match="holds no rows, so its columns are unknown"):
        write_job_file(options)
