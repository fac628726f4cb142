"""Embedding jobs match transformers; bad rows become errors."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

from batchinfer.config import EmbedConfig
from batchinfer.errors import ExitCode, JobError, ModelError, UsageError
from batchinfer.job.job import open_input, open_job
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.resume import plan_of
from batchinfer.job.plan.plan import plan_job
from batchinfer.job.rows.tasks import TASKS
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.pooling.embedding import Embedder, EmbeddingModules, read_embedding_modules
from batchinfer.report.from_output import find_examples
from batchinfer.report.thumbnails import Pictures
from tests.job.datasets import write_parquet
from tests.job.job_files import write_job
from tests.job.rows.jobs import rows_of, summary_of
from tests.models import make_text_model

SAME = 0.99999
TEXT = "seventeen letters"
PROMPTS = [
    "is it so?",
    "x",
    "a long text about nothing at all, which fills some blocks and ends",
    "a long text about nothing at all, which fills some blocks and goes on",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model without an output head, like an embedding model; its embeddings are not tied."""
    folder = make_text_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=False)
    AutoModel.from_pretrained(folder).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_bytes())["architectures"] == ["LlamaModel"]
    return folder


def job(tmp_path: Path, model: Path, prompts: list[str], more: str = "") -> Any:
    write_parquet(tmp_path / "rows.parquet", {"prompt": prompts})
    text = f"""\
task: embed
model: {{name: {model}, dtype: float32}}
input: {{path: rows.parquet}}
engine: {{device: cpu, num_kv_blocks: 64, block_size: 4, max_num_batched_tokens: 7}}
output: {{path: out, rows_per_part: 2}}
errors: {{max_error_rate: 1.0}}
{more}"""
    return load_job(write_job(tmp_path, text))


@cache
def hidden_state(model: Path, prompt: str) -> npt.NDArray[np.float32]:
    """Return transformers' last hidden state of the last token."""
    reference = AutoModel.from_pretrained(model, dtype=torch.float32)
    inputs = AutoTokenizer.from_pretrained(model)(prompt, return_tensors="pt")
    with torch.no_grad():
        found: npt.NDArray[np.float32] = reference(**inputs).last_hidden_state[0, -1].numpy()
    return found


def cosine(one: Any, other: Any) -> float:
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_embeddings_equal_those_of_transformers(tmp_path: Path, model: Path) -> None:
    assert run_job(job(tmp_path, model, PROMPTS), quiet=True) is ExitCode.OK
    rows = rows_of(tmp_path)
    assert list(rows[0])[1:] == [
        *("row_id", "embedding", "num_prompt_tokens", "truncated", "status", "error")
    ]
    for row, prompt in zip(rows, PROMPTS, strict=True):
        expected = hidden_state(model, prompt)
        assert cosine(row["embedding"], expected) > SAME
        assert np.linalg.norm(row["embedding"]) == pytest.approx(1, abs=1e-5)
    summary = summary_of(tmp_path)
    assert summary["tokens"]["output"] == 0


@pytest.mark.parametrize(("max_model_len", "status"), [(17, "ok"), (16, "error")])
def test_text_may_have_max_model_len_tokens(
    tmp_path: Path, model: Path, max_model_len: int, status: str
) -> None:
    spec = job(tmp_path, model, [TEXT, "x"])
    size = {"max_model_len": max_model_len}
    spec = spec.model_copy(update={"model": spec.model.model_copy(update=size)})
    assert run_job(spec, quiet=True) in (ExitCode.OK, ExitCode.TOO_MANY_ROW_ERRORS)
    row = rows_of(tmp_path)[0]
    assert row["status"] == status
    if status == "ok":
        assert row["num_prompt_tokens"] == max_model_len
        assert cosine(row["embedding"], hidden_state(model, TEXT)) > SAME


def with_modules(folder: Path, model: Path, *, pooling: str = "lasttoken") -> torch.nn.Linear:
    """Write a model folder in the format of sentence-transformers; return its Dense layer."""
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    paths = ["", "1_Pooling", "2_Dense", "3_Normalize"]
    modules = [
        {"idx": at, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in paths[1:]:
        (folder / path).mkdir()
    modes = {"mean_tokens": "mean", "lasttoken": "lasttoken"}
    config: dict[str, Any] = {f"pooling_mode_{k}": mode == pooling for k, mode in modes.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    dense = torch.nn.Linear(len(hidden_state(model, "x")), 24)
    activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(activation))
    tensors = {f"linear.{name}": value for name, value in dense.state_dict().items()}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    return dense


@pytest.mark.parametrize(
    ("name", "text"),
    [("modules.json", "[5]"), ("modules.json", "{}"), ("sentence_bert_config.json", "[1]")],
)
def test_a_broken_file_of_a_model_folder_is_named(
    tmp_path: Path, model: Path, name: str, text: str
) -> None:
    with_modules(tmp_path / "model", model)
    (tmp_path / "model" / name).write_text(text)
    with pytest.raises(ModelError, match=rf"{name} must be"):
        read_embedding_modules(str(tmp_path / "model"), None)


def test_dense_layers_of_the_folder_are_run(tmp_path: Path, model: Path) -> None:
    dense = with_modules(tmp_path / "model", model)
    for name, keys, size in (
        ("whole", "", 24),
        ("cut", "dimensions: 5, normalize: false, dtype: float16", 5),
    ):
        folder = tmp_path / name
        folder.mkdir()
        spec = job(folder, tmp_path / "model", PROMPTS, f"embed: {{{keys}}}\n")
        assert run_job(spec, quiet=True) is ExitCode.OK
        kind = pq.read_schema(next((folder / "out" / "data").iterdir())).field("embedding")
        assert kind.type == pa.list_(pa.float16() if keys else pa.float32(), size)
        for row, prompt in zip(rows_of(folder), PROMPTS, strict=True):
            with torch.no_grad():
                expected = dense(torch.from_numpy(hidden_state(model, prompt))).tanh()[:size]
            if keys:
                assert row["embedding"] == pytest.approx(expected.tolist(), abs=1e-3)
            else:
                assert cosine(row["embedding"], expected) > SAME


@pytest.mark.parametrize("size", [300.0, 1e5, 1e30])
def test_half_precision_rounds_the_finished_embedding(size: float) -> None:
    """All squares overflow float16. The values 1e5 and 1e30 overflow it themselves, and the square
    of 1e30 overflows even float32."""
    embed = Embedder(EmbeddingModules(4), EmbedConfig(dtype="float16"))
    vector = embed(np.full(4, size, np.float32))
    assert vector.dtype == np.float16
    assert vector.tolist() == [0.5] * 4


def without_normalize(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_bytes())
    (folder / "modules.json").write_text(json.dumps(modules[:-1]))


@pytest.mark.parametrize(
    ("lists_normalize", "embed", "is_unit"),
    [
        (True, "", True),
        (False, "", False),
        (True, "embed: {normalize: false}\n", False),
        (False, "embed: {normalize: true}\n", True),
    ],
)
def test_embeddings_have_length_1_if_the_model_or_the_job_says_so(
    tmp_path: Path, model: Path, lists_normalize: bool, embed: str, is_unit: bool
) -> None:
    dense = with_modules(tmp_path / "model", model)
    if not lists_normalize:
        without_normalize(tmp_path / "model")
    assert run_job(job(tmp_path, tmp_path / "model", [TEXT], embed), quiet=True) is ExitCode.OK
    with torch.no_grad():
        expected = dense(torch.from_numpy(hidden_state(model, TEXT))).tanh()
    expected = expected / expected.norm() if is_unit else expected
    (row,) = rows_of(tmp_path)
    assert row["embedding"] == pytest.approx(expected.tolist(), abs=1e-5)


def test_dense_layer_may_be_in_bfloat16(tmp_path: Path, model: Path) -> None:
    dense = with_modules(tmp_path / "model", model).bfloat16()
    tensors = {f"linear.{name}": value for name, value in dense.state_dict().items()}
    save_file(tensors, tmp_path / "model" / "2_Dense" / "model.safetensors")
    (layer,) = read_embedding_modules(str(tmp_path / "model"), None).dense
    assert np.array_equal(layer.weight, dense.weight.detach().float().numpy())


def test_truncate_dim_of_the_model_is_the_default_of_dimensions(
    tmp_path: Path, model: Path
) -> None:
    with_modules(tmp_path / "model", model)
    path = tmp_path / "model" / "config_sentence_transformers.json"
    path.write_text('{"truncate_dim": 8}')
    modules = read_embedding_modules(str(tmp_path / "model"), None)
    assert Embedder(modules, EmbedConfig()).width == 8
    assert Embedder(modules, EmbedConfig(dimensions=16)).width == 16
    path.write_text('{"truncate_dim": 100}')
    modules = read_embedding_modules(str(tmp_path / "model"), None)
    assert Embedder(modules, EmbedConfig()).width == 24, "the model has no more"
    path.write_text('{"truncate_dim": 0}')
    with pytest.raises(ModelError, match="truncate_dim is '0'; it must be"):
        read_embedding_modules(str(tmp_path / "model"), None)


def test_fingerprint_says_whether_embeddings_are_normalized(tmp_path: Path, model: Path) -> None:
    def fingerprint(folder: Path, embed: str = "") -> str:
        spec = job(tmp_path, folder, [TEXT], embed)
        return open_job(spec, open_input(spec)).manifest.fingerprint

    folder = tmp_path / "model"
    with_modules(folder, model)
    listed = fingerprint(folder, "embed: {dtype: float32}\n")
    assert listed == fingerprint(folder, "embed: {normalize: true}\n")
    assert listed != fingerprint(folder, "embed: {normalize: false}\n")
    without_normalize(folder)
    assert listed != fingerprint(folder, "embed: {dtype: float32}\n")


def test_named_prompts_are_prepended_to_texts(tmp_path: Path, model: Path) -> None:
    dense = with_modules(tmp_path / "model", model)
    named = {"prompts": {"query": "<|im_start|>ask: ", "document": ""}}
    named["default_prompt_name"] = "query"
    (tmp_path / "model" / "config_sentence_transformers.json").write_text(json.dumps(named))
    (tmp_path / "model" / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    text, written = "is it <|im_end|>?", "prompt: {template: 'x {{ prompt }}'}\n"
    tokens = {"": 6, "prompt_name: query": 6, "prompt_name: document": 0, "prompt_name: ''": 0}
    for at, (keys, more) in enumerate(tokens.items()):
        (tmp_path / str(at)).mkdir()
        spec = job(tmp_path / str(at), tmp_path / "model", [text], f"embed: {{{keys}}}\n")
        plan = plan_job(spec)
        assert plan["prompt_tokens"] == len(text) + more, "the row's <|im_end|> stays text"
    plan = plan_job(job(tmp_path, tmp_path / "model", [text], written))
    assert plan["prompt_tokens"] == len(text) + 2, "prompt.template replaces the default prompt"
    spec = job(tmp_path, tmp_path / "model", ["good", "x" * 40], "embed: {dtype: float32}\n")
    assert run_job(spec, quiet=True) is ExitCode.OK
    good, bad = rows_of(tmp_path)
    assert bad["error"]["code"] == "prompt_too_long"
    assert "46 tokens; at most 40 fit in max_model_len" in bad["error"]["message"]
    with torch.no_grad():
        expected = dense(torch.from_numpy(hidden_state(model, "<|im_start|>ask: good"))).tanh()
    assert cosine(good["embedding"], expected) > SAME


def test_rows_that_cannot_run_have_no_embedding(tmp_path: Path, model: Path) -> None:
    spec = job(tmp_path, model, ["good", "", "x" * 600])
    assert run_job(spec, quiet=True) is ExitCode.OK
    rows = rows_of(tmp_path)
    codes = [row["error"] and row["error"]["code"] for row in rows]
    assert codes == [None, "empty_prompt", "prompt_too_long"]
    assert [row["embedding"] is None for row in rows] == [False, True, True]
    out = OutputDir(tmp_path / "out")
    records = [(part, out.finished(part)) for part in plan_of(out).parts()]
    good, bad, _ = find_examples(out, records, TASKS["embed"], Pictures({}, ""))
    assert good.answer.startswith("[")
    assert (bad.answer, bad.facts) == (None, "0 input tokens")


def test_a_model_is_checked(tmp_path: Path, model: Path) -> None:
    with pytest.raises(
        UsageError, match="dimensions is 9999, but the model's embeddings have only"
    ):
        run_job(job(tmp_path, model, ["x"], "embed: {dimensions: 9999}\n"), quiet=True)
    with pytest.raises(UsageError, match=r"has no prompt 'query'; its prompts are: \(none\)"):
        run_job(job(tmp_path, model, ["x"], "embed: {prompt_name: query}\n"), quiet=True)
    with_modules(tmp_path / "chat", model)
    takes = {"modality_config": {"text": {}, "message": {}}}
    (tmp_path / "chat" / "sentence_bert_config.json").write_text(json.dumps(takes))
    with pytest.raises(
        UsageError, match="asks for its chat template without the generation prompt"
    ):
        run_job(job(tmp_path, tmp_path / "chat", ["x"]), quiet=True)
    with_modules(tmp_path / "broken", model)
    (tmp_path / "broken" / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="of a Dense layer that"):
        run_job(job(tmp_path, tmp_path / "broken", ["x"]), quiet=True)
    for key, value in (("use_residual", True), ("module_input_name", "token_embeddings")):
        with_modules(tmp_path / key, model)
        (tmp_path / key / "2_Dense" / "config.json").write_text(json.dumps({key: value}))
        with pytest.raises(ModelError, match=f"a Dense layer with {key}.* is not yet supported"):
            read_embedding_modules(str(tmp_path / key), None)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((0, 1, 3, 2), "a module 'Dense' after a module 'Normalize'"),
        ((0, 1, 1, 2), "a module 'Pooling' after a module 'Pooling'"),
    ],
)
def test_modules_in_another_order_are_refused(
    tmp_path: Path, model: Path, order: tuple[int, ...], message: str
) -> None:
    with_modules(tmp_path / "model", model)
    path = tmp_path / "model" / "modules.json"
    modules = json.loads(path.read_bytes())
    path.write_text(json.dumps([modules[at] for at in order]))
    with pytest.raises(ModelError, match=message):
        read_embedding_modules(str(tmp_path / "model"), None)


def test_a_model_without_an_output_head_generates_no_text(tmp_path: Path, model: Path) -> None:
    spec: JobSpec = job(tmp_path, model, ["x"])
    text = (tmp_path / "job.yaml").read_text()
    changed = text.replace("task: embed", "sampling: {max_tokens: 3}")
    assert spec.task == "embed"
    with pytest.raises(JobError, match="head and generates no text; set task: embed"):
        run_job(load_job(write_job(tmp_path, changed)), quiet=True)
