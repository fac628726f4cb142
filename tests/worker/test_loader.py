"""Models load with the right facts and clear log lines; broken model folders are refused."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from batchinfer.config import ModelConfig
from batchinfer.errors import ExitCode, ModelError
from batchinfer.worker import loader
from batchinfer.worker.loader import LoadedModel, describe_model, load_model
from batchinfer.worker.model.config import load_config
from tests.lora import make_adapter
from tests.models import VOCAB_SIZE, make_checkpoint, tiny_model

CPU = torch.device("cpu")
_ATTENTION = "model.layers.0.self_attn"


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(ModelConfig(str(folder), **options), device=CPU)


def change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path)


def test_loads_as_saved(llama: Path) -> None:
    loaded = load(llama)
    parameters = list(loaded.model.parameters())
    assert {p.dtype for p in parameters} == {torch.float32}
    assert not any(p.requires_grad for p in parameters)
    assert not loaded.model.training
    assert loaded.dtype == "float32"
    assert loaded.max_model_len == 512
    assert loaded.eos_token_ids == frozenset()
    assert loaded.facts["family"] == "llama"
    assert loaded.layout(16).num_kv_heads == 2


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads mapped files from /proc")
def test_the_weights_file_does_not_stay_in_memory(llama: Path) -> None:
    loaded = load(llama)
    assert str(llama / "model.safetensors") not in Path("/proc/self/maps").read_text()
    assert len(list(loaded.model.parameters())) > 0


def test_casts_when_asked(llama: Path) -> None:
    loaded = load(llama, dtype="bfloat16")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.layout(16).element_bytes == 2


def test_takes_a_shorter_max_model_len(llama: Path) -> None:
    assert load(llama, max_model_len=100).max_model_len == 100
    with pytest.raises(ModelError, match=r"max_model_len is 600.*at most 512"):
        load(llama, max_model_len=600)
    with pytest.raises(ModelError, match=r"max_model_len is 1; it must be 2 or more"):
        load(llama, max_model_len=1)


def test_collects_every_end_of_sequence_id(llama: Path) -> None:
    change_json(llama / "config.json", eos_token_id=5)
    change_json(llama / "generation_config.json", eos_token_id=[2, 7])
    assert load(llama).eos_token_ids == {2, 7}
    change_json(llama / "generation_config.json", eos_token_id=None)
    assert load(llama).eos_token_ids == {5}


def _garble(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def _missing_shard(folder: Path) -> None:
    change_json(
        folder / "model.safetensors.index.json", weight_map={"a": "model-00002.safetensors"}
    )


def _false_shape(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    assert raw.count(b'"shape":[199,32]') == 2
    path.write_bytes(raw.replace(b'"shape":[199,32]', b'"shape":[198,32]', 1))


def _control_characters_as_dtype(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F\x7f2"', 1))


def _large_vocabulary(folder: Path) -> None:
    words = {f"w{i}": i for i in range(VOCAB_SIZE + 1)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def _falcon(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "falcon"}))


def _config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "config.json", **changes)


def _generation(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "generation_config.json", **changes)


def _index(**content: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "model.safetensors.index.json", **content)


def _with_tensors(*names: str) -> Callable[[Path], None]:
    def add(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path) | {name: torch.zeros(4) for name in names}
        save_file(tensors, path, metadata={"format": "pt"})

    return add


def _nested_header(folder: Path) -> None:
    header = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def _nested_config(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000 + "]" * 100_000)


def _endless(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")


def _pipe(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_garble, "not a safetensors file"),
        (_missing_shard, "model-00002.safetensors is missing"),
        (_large_vocabulary, f"ids up to {VOCAB_SIZE}, but the model has {VOCAB_SIZE} embeddings"),
        (_config(model_type=None), "config.json has no model_type"),
        (_config(model_type=["llama"]), "config.json has no model_type"),
        (_config(hidden_size="x"), 'config.json: hidden_size is "x"; it must be a whole number'),
        (_config(max_position_embeddings=1), r"config.json \(max_\w+\) allows 1 tokens"),
        (_config(eos_token_id="x"), "config.json: Field 'eos_token_id' with value 'x'"),
        (_generation(eos_token_id="x"), '/generation_config.json: eos_token_id has "x"'),
        (_generation(eos_token_id=[1, None]), "/generation_config.json: eos_token_id has null"),
        (_generation(eos_token_id=[3, -1]), "/generation_config.json: eos_token_id has -1"),
        (_generation(eos_token_id=True), "/generation_config.json: eos_token_id has true"),
        (_generation(eos_token_id=VOCAB_SIZE), r"eos_token_id has 199; .* 0 to 198"),
        (_index(weight_map=3), "index.json: weight_map must map tensors to names"),
        (_index(weight_map={"a": 3}), "index.json: weight_map must map tensors to names"),
        (_config(quantization_config={"quant_method": "quip"}), "quantized .* not yet"),
        (_config(model_type="nonesuch"), "'nonesuch'"),
        (_config(model_type="rwkv"), "'rwkv' cannot be run.*recurrent"),
        (_config(model_type="bloom"), "ALiBi"),
        (
            _config(layer_types=["x" * 999] * 3),
            r"has layers of unknown types \(layer_types\): x+\.\.\.",
        ),
        (_falcon, "'falcon' cannot be run.*replaced"),
        (_config(model_type="vit"), "vit"),
        (_config(architectures=["LlamaForSequenceClassification"]), "SequenceClassification"),
        (_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
        (_config(num_hidden_layers=4), r"9 tensors are missing.*: model\.layers\.3\.\w+"),
        (
            _config(num_hidden_layers=1),
            r"18 tensors that the model .* does not have: model\.layers\.1\.\w+",
        ),
        (_config(num_hidden_layers=1), "take config.json and the safetensors files from the same"),
        (
            _config(vocab_size=300),
            "lm_head.weight is 199 x 32, but according to config.json .* 300 x 32",
        ),
        (
            _with_tensors(f"{_ATTENTION}.q_norm.weight"),
            "1 tensors that the model .* does not have.*q_norm",
        ),
        (_with_tensors(f"{_ATTENTION}.q_proj.bias"), "q_proj.bias; take config.json and the"),
        (_with_tensors("model.embed_tokens.scale"), "does not have: model.embed_tokens.scale;"),
        (_with_tensors("model.norm.bias"), "does not have: model.norm.bias;"),
        (_with_tensors("lm_head.bias"), "does not have: lm_head.bias;"),
        (_with_tensors(f"{_ATTENTION}.q_proj.lora_A.weight"), "lora_A.weight; merge the adapters"),
        (_false_shape, "safetensors files are damaged .*; fetch the model again"),
        (_control_characters_as_dtype, r"files are damaged .* variant `F\\x7f2`, expected"),
        (_config(num_key_value_heads=0), "/config.json: num_key_value_heads is 0; it must be 1"),
        (_config(head_dim=0), "/config.json: head_dim is 0; it must be 1 or more"),
        (_config(num_attention_heads=0), "/config.json: num_attention_heads is 0; it must be 1"),
        (_config(max_position_embeddings=10**15), "/config.json: max_position_embeddings is 10"),
        (
            _config(num_hidden_layers=10**8),
            "/config.json: num_hidden_layers is 100000000; it must be at most",
        ),
        (_config(num_attention_heads=5), "/config.json: num_attention_heads is 5: .*not a multipl"),
        (_config(hidden_act="nope"), '/config.json: hidden_act is "nope": transformers cannot'),
        (_config(vocab_size=10**7), "/config.json describes a model of .*vocab_size"),
        (_config(quantization_config=[4]), "/config.json: quantization_config is"),
        (_config(layer_types=["\x1b[31m"]), r"layers of unknown types \(layer_types\): \?\[31m"),
        (_nested_config, "/config.json is nested too deeply"),
        (_nested_header, "/model.safetensors is not a safetensors file"),
        (_endless, "/model.safetensors is not a file"),
        (_pipe, "/generation_config.json is not a file"),
        (_index(weight_map={"a": "../a.safetensors"}), "names of safetensors files"),
    ],
)
def test_refuses_in_one_line(llama: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(llama)
    with pytest.raises(ModelError, match=message) as raised:
        load(llama)
    assert raised.value.exit_code == ExitCode.MODEL
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("llama", "model.rotary_emb.inv_freq"),
        ("llama", "v_head.summary.weight"),
        ("llama", "score.weight"),
        ("llama", "classifier.bias"),
        ("llama", "mtp.layers.0.mlp.up_proj.weight"),
        ("llama", "model.mtp_layers.0.mlp.up_proj.weight"),
        ("llama", "vision_tower.layers.0.mlp.up_proj.weight"),
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "transformer.h.0.attn.masked_bias"),
        ("gpt2", "h.0.attn.masked_bias"),
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias"),
    ],
)
def test_unused_tensors_are_not_an_error(tmp_path: Path, family: str, name: str) -> None:
    _with_tensors(name)(make_checkpoint(family, tmp_path))
    assert load(tmp_path).dtype == "float32"


def test_multi_token_prediction_layers_are_ignored(tmp_path: Path) -> None:
    make_checkpoint("deepseek_v3", tmp_path, num_nextn_predict_layers=1)
    _with_tensors("model.layers.3.eh_proj.weight")(tmp_path)
    assert load(tmp_path).dtype == "float32"
    _with_tensors("model.layers.4.eh_proj.weight")(tmp_path)
    with pytest.raises(
        ModelError, match=r"1 tensors that the model .* does not have.*model\.layers\.4\."
    ):
        load(tmp_path)


@pytest.mark.parametrize("kept", [("config.json",), ()])
def test_an_adapter_in_the_models_folder_is_refused(llama: Path, kept: tuple[str, ...]) -> None:
    change_json(llama / "adapter_config.json", base_model_name_or_path="some/base")
    if "config.json" not in kept:
        (llama / "config.json").unlink()
    with pytest.raises(ModelError, match="holds an adapter") as caught:
        load(llama)
    assert "model.adapters" in str(caught.value)


def test_nothing_in_the_folder_is_executed(llama: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    (llama / "evil.py").write_text(f"open({str(witness)!r}, 'w')\nclass Model: pass\n")
    change_json(llama / "config.json", auto_map={"AutoConfig": "evil.Model"})
    with pytest.raises(ModelError, match="never run"):
        load(llama)
    assert not witness.exists()


def test_a_model_that_fused_layers_change_is_loaded_again(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(model: torch.nn.Module, *_: Any) -> bool:
        for parameter in model.parameters():
            parameter.zero_()
        return False

    monkeypatch.setattr(loader, "fuse", spoil)
    assert all(parameter.any() for parameter in load(llama).model.parameters())


@pytest.mark.parametrize(
    ("family", "changed", "device_type", "message"),
    [
        ("minicpm3", "o_proj", "cpu", None),
        ("minicpm3", "kv_b_proj", "cpu", "an adapter changes kv_b_proj"),
        ("minicpm3", "o_proj", "cuda", "the model has 16"),
        ("llama", "o_proj", "cpu", "'llama' have no latents to cache"),
    ],
)
def test_families_that_keep_latents(
    family: str, changed: str, device_type: str, message: str | None, tmp_path: Path
) -> None:
    model = make_checkpoint(family, tmp_path / "model")
    make_adapter(tiny_model(family), tmp_path / "one", seed=1, target_modules=[changed])
    choice = ModelConfig(str(model), adapters={"one": str(tmp_path / "one")})
    if message is None:
        assert describe_model(choice, device_type, latent=True).layout(16).latent
        return
    with pytest.raises(ModelError, match=message):
        describe_model(choice, device_type, latent=True)


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
