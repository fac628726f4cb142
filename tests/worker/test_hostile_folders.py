from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchinfer.config import ModelConfig
from batchinfer.errors import ModelError
from batchinfer.worker.loader import load_model
from batchinfer.worker.model.config import load_config
from tests.models import make_checkpoint


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path)


def load(folder: Path) -> None:
    load_model(ModelConfig(str(folder)), device=torch.device("cpu"))


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _index(folder: Path) -> None:
    index = {"weight_map": {"a": "../a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _nested_header(folder: Path) -> None:
    header = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def _nested_config(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000 + "]" * 100_000)


def _endless(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "generation_config.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_config(num_key_value_heads=0), "/config.json: num_key_value_heads is 0; it must be 1"),
        (_config(head_dim=0), "/config.json: head_dim is 0; it must be 1 or more"),
        (_config(num_attention_heads=0), "/config.json: num_attention_heads is 0; it must be 1"),
        (_config(max_position_embeddings=10**15), "/config.json: max_position_embeddings is 10"),
        (_config(num_hidden_layers=10**8), "/config.json: num_hidden_layers is 100000000; at most"),
        (_config(num_attention_heads=5), "/config.json: num_attention_heads is 5: .*not a multipl"),
        (_config(hidden_act="nope"), '/config.json: hidden_act is "nope": transformers cannot'),
        (_config(vocab_size=10**7), "/config.json describes a model of .*vocab_size"),
        (_config(quantization_config=[4]), "/config.json: quantization_config is"),
        (_config(layer_types=["\x1b[31m"]), r"layers \(layer_types\) of the type \?\[31m"),
        (_nested_config, "/config.json is nested too deeply"),
        (_nested_header, "/model.safetensors is not a safetensors file"),
        (_endless, "/model.safetensors is not a file"),
        (_pipe, "/generation_config.json is not a file"),
        (_index, "names of safetensors files"),
    ],
)
def test_a_hostile_folder_is_refused_by_file_and_key(
    llama: Path, damage: Callable[[Path], object], message: str
) -> None:
    (llama / "generation_config.json").unlink()
    damage(llama)
    with pytest.raises(ModelError, match=message) as raised:
        load(llama)
    assert "\n" not in str(raised.value)


def test_experts_of_widths_that_torch_does_not_multiply(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, moe_intermediate_size=23)
    with pytest.raises(ModelError, match=r"/config.json: moe_intermediate_size is 23: .* all exp"):
        load(tmp_path)


def test_values_that_fail_when_the_model_runs_are_named(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    _config(num_experts_per_tok=5)(tmp_path)
    with pytest.raises(ModelError, match=r"/config.json: num_experts_per_tok is 5: .*cannot be"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 0}, "linear_num_key_heads is 0; it must be 1 or more"),
        ({"linear_num_value_heads": -1}, "linear_num_value_heads is -1; it must be 1 or more"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0; it must be 1 or more"),
        ({"linear_value_head_dim": 0}, "linear_value_head_dim is 0; it must be 1 or more"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must be 2 or more"),
        (
            {"linear_num_key_heads": 3, "linear_num_value_heads": 4},
            "linear_num_value_heads is 4; it must be a multiple of linear_num_key_heads",
        ),
        (
            {"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2},
            "all layers in layer_types are recurrent",
        ),
        (
            {
                "layer_types": ["linear_attention", "sliding_attention"],
                "num_hidden_layers": 2,
                "sliding_window": 8,
            },
            "layer_types has sliding windows beside recurrent layers",
        ),
    ],
)
def test_hostile_values_of_recurrent_layers_are_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    make_checkpoint("qwen3_5_text", tmp_path)
    _config(**changes)(tmp_path)
    with pytest.raises(ModelError, match=f"/config.json: {message}"):
        load_config(tmp_path)


def test_missing_sizes_of_recurrent_layers_have_their_familys_defaults(tmp_path: Path) -> None:
    make_checkpoint("qwen3_5_text", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["linear_conv_kernel_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_config(tmp_path)
