"""Heads of classifiers in model folders, including damaged ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from batchinfer.config import ClassifyConfig
from batchinfer.errors import JobError
from batchinfer.pooling.classifier import read_classifier
from batchinfer.pooling.layers import gelu, relu, sigmoid, silu, softmax
from batchinfer.pooling.read_safetensors import find_tensor

TOKENS = {"no": 1, "yes": 2}
CONFIG = {
    "architectures": ["LlamaForSequenceClassification"],
    "hidden_size": 4,
    "id2label": {"0": "a", "1": "b", "2": "c"},
}


def folder_of(path: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_tensors_equal_saved_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = torch.randn(7, 5).to(dtype)
    others = {"a": torch.zeros(3, dtype=torch.int8), "model.z.weight": torch.ones(2)}
    folder = folder_of(tmp_path / "m", {}, {"model.score.weight": saved, **others})
    found = find_tensor(folder, "nothing", "score.weight")
    assert found.read().tolist() == saved.float().tolist()
    assert found.read([5, 0]).tolist() == saved.float()[[5, 0]].tolist()
    assert find_tensor(folder, "core.weight") is None, "a name is not found by a suffix of it"


HEAD = {"score.weight": torch.ones(3, 4)}


@pytest.mark.parametrize(
    ("config", "files", "tensors", "message"),
    [
        ({"architectures": []}, {}, HEAD, "no classification head"),
        ({"architectures": "x"}, {}, HEAD, "no classification head"),
        ({}, {}, {"x": torch.ones(1)}, "no tensor score.weight"),
        ({"hidden_size": 5}, {}, HEAD, "score.weight is 3 x 4, but the width in config.json is 5"),
        (
            {},
            {},
            {"score.weight": torch.ones(3)},
            "score.weight is 3, but the width in config.json is 4",
        ),
        ({}, {}, {**HEAD, "score.bias": torch.ones(2)}, "score.bias does not belong"),
        (
            {},
            {},
            {"score.weight": torch.ones(3, 4, dtype=torch.int8)},
            "stored as I8, which is not yet",
        ),
        (
            {"id2label": {"0": "a"}},
            {},
            HEAD,
            "id2label has 1 labels, but the classification head has 3",
        ),
        (
            {"id2label": dict(enumerate("abcd"))},
            {},
            HEAD,
            "id2label has 4 labels, but the classification head has 3",
        ),
        ({"sbert_ce_default_activation_function": "x.GELU"}, {}, HEAD, "the activation x.GELU"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            {
                "modules.json": [5, {"type": "x.LogitScore", "path": "1"}],
                "1/config.json": {"true_token_id": "yes"},
            },
            HEAD,
            "1/config.json: true_token_id and false_token_id must be token ids",
        ),
        (
            {"architectures": ["LlamaForCausalLM"]},
            {
                "modules.json": [{"type": "x.LogitScore", "path": "1"}],
                "1/config.json": {"true_token_id": 9},
            },
            {"lm_head.weight": torch.ones(3, 4)},
            "lm_head.weight has no row for token id 9",
        ),
    ],
)
def test_invalid_model_folders_are_refused(
    tmp_path: Path, config: Any, files: Any, tensors: Any, message: str
) -> None:
    folder = folder_of(tmp_path / "m", config, tensors)
    (folder / "1").mkdir()
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    with pytest.raises(JobError, match=message):
        read_classifier(str(folder), None, ClassifyConfig(), TOKENS.get)


def test_unrelated_files_in_model_folder_are_ignored(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", {"sentence_transformers": 5, "text_config": None}, HEAD)
    (folder / "config_sentence_transformers.json").write_text("[]")
    classifier = read_classifier(str(folder), None, ClassifyConfig(), TOKENS.get)
    assert classifier.labels == ("a", "b", "c")
    assert classifier(np.ones(4, np.float32)).tolist() == pytest.approx([1 / 3] * 3)


def test_classify_tokens_refuses_models_with_changed_logits(tmp_path: Path) -> None:
    config = {"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": 30.0}
    folder = folder_of(tmp_path / "m", config, {"model.embed_tokens.weight": torch.ones(3, 4)})
    asked = ClassifyConfig(tokens=("no", "yes"))
    with pytest.raises(
        JobError, match=r"token labels of a model that changes its logits \(final_logit"
    ):
        read_classifier(str(folder), None, asked, TOKENS.get)


def test_embeddings_do_not_replace_a_quantized_head(tmp_path: Path) -> None:
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(values))
    embeddings = {"model.embed_tokens.weight": torch.arange(12.0).view(3, 4)}
    weights = tmp_path / "model.safetensors"
    save_file({**embeddings, "lm_head.qweight": torch.zeros(1, 3, dtype=torch.int32)}, weights)
    asked = ClassifyConfig(tokens=("no", "yes"))
    with pytest.raises(JobError, match=r"model.safetensors: .*\(lm_head.qweight\) are not yet"):
        read_classifier(str(tmp_path), None, asked, ["no", "yes"].index)
    save_file({**embeddings, "lm_head.bias": torch.zeros(3)}, weights)
    assert read_classifier(str(tmp_path), None, asked, ["no", "yes"].index).labels == ("no", "yes")


def test_classify_tokens_adds_the_output_head_bias(tmp_path: Path) -> None:
    values = {"model_type": "phi", "architectures": ["PhiForCausalLM"], "hidden_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(values))
    head = {"lm_head.weight": torch.arange(12.0).view(3, 4), "lm_head.bias": torch.arange(3.0)}
    save_file(head, tmp_path / "model.safetensors")
    asked = ClassifyConfig(tokens=("no", "yes"), activation="none")
    found = read_classifier(str(tmp_path), None, asked, ["no", "yes"].index)
    assert found(np.ones(4, np.float32)).tolist() == [6.0, 23.0]


def test_activations_equal_those_of_torch() -> None:
    values = np.array([-90, -3, -0.5, 0, 1e-3, 2, 90], np.float32)
    ours = {
        torch.nn.GELU(): gelu,
        torch.nn.ReLU(): relu,
        torch.nn.Sigmoid(): sigmoid,
        torch.nn.SiLU(): silu,
        torch.nn.Softmax(0): softmax,
    }
    for theirs, activation in ours.items():
        np.testing.assert_allclose(activation(values), theirs(torch.from_numpy(values)), atol=1e-6)


def test_classify_tokens_refuses_encoders(tmp_path: Path) -> None:
    tensors = {"embed_tokens.weight": torch.ones(3, 4)}
    folder = folder_of(tmp_path / "m", {"model_type": "eurobert"}, tensors)
    config = ClassifyConfig(tokens=("no", "yes"))
    with pytest.raises(JobError, match="tokens needs a model that generates text"):
        read_classifier(str(folder), None, config, TOKENS.get)


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    asked = ClassifyConfig()
    folder = folder_of(tmp_path / "pipe", {}, HEAD)
    os.mkfifo(folder / "config_sentence_transformers.json")
    with pytest.raises(JobError, match=r"config_sentence_transformers.json is not a file"):
        read_classifier(str(folder), None, asked, TOKENS.get)
    folder = folder_of(tmp_path / "weights", {}, HEAD)
    (folder / "a.safetensors").symlink_to("/dev/zero")
    with pytest.raises(JobError, match=r"a.safetensors is not a file"):
        read_classifier(str(folder), None, asked, TOKENS.get)
