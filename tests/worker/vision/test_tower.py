"""Incomplete towers are refused, and rows with images are batch-invariant."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from batchinfer.config import ModelConfig, SamplingParams
from batchinfer.engine.images import Image, StepImage
from batchinfer.errors import ModelError
from batchinfer.worker.fusion.native_layers import decoder_layers_of
from batchinfer.worker.linear.kernel_choice import KernelRequirements
from batchinfer.worker.loader import LoadedModel, load_model
from batchinfer.worker.vision.image_embeddings import ImageEmbeddings
from batchinfer.worker.vision.tower import (
    VisionTower,
    attention_size,
    load_vision_tower,
    vision_tower_bytes,
)
from tests.parity import CPU, OUTPUT_TOKENS, Setup, make_engine, run_engine
from tests.vision_models import (
    IMAGE_TOKEN,
    VISION_FAMILIES,
    make_vision_checkpoint,
    random_image,
)
from tests.worker.model.quantized.writers import CASES
from tests.worker.vision.test_images import ROWS, Row


def tower_of(folder: Path) -> VisionTower:
    tower = load_vision_tower(folder, AutoConfig.from_pretrained(folder), "float32", CPU)
    assert tower is not None
    return tower


def write(folder: Path, config: str, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llava", "multi_modal_projector.linear_2.weight"),
        ("qwen2_5_vl", "visual.blocks.1.attn.qkv.weight"),
        ("qwen3_vl", "model.visual.deepstack_merger_list.1.linear_fc1.weight"),
    ],
)
def test_towers_with_wrong_tensors_are_refused(family: str, name: str, tmp_path: Path) -> None:
    """transformers would give missing tensors random values."""
    whole = make_vision_checkpoint(family, tmp_path / "whole")
    config = (whole / "config.json").read_text()
    tensors = load_file(whole / "model.safetensors")
    tensor = tensors.pop(name)
    missing = write(tmp_path / "missing", config, tensors)
    with pytest.raises(ModelError, match=f"1 tensors are missing .*{name}"):
        tower_of(missing)
    wrong = write(tmp_path / "wrong", config, {**tensors, name: tensor[1:].contiguous()})
    with pytest.raises(ModelError, match=f"{name} is .*, but according to config.json"):
        tower_of(wrong)


@pytest.mark.parametrize("case", ["fp8 blocks", "gptq", "nf4"])
def test_towers_of_quantized_checkpoints_are_dequantized(case: str, tmp_path: Path) -> None:
    section, writer = CASES[case]
    whole = make_vision_checkpoint("llava", tmp_path / "whole")
    config = json.loads((whole / "config.json").read_text())
    tensors = load_file(whole / "model.safetensors")
    quantized, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if ".layers." in name and weight.dim() == 2:
            written = writer(weight)
            layer = name.removesuffix("weight")
            del quantized[name]
            quantized |= {layer + end: part.contiguous() for end, part in written.parts.items()}
            plain[name] = written.weight.contiguous()
    folders = (
        write(
            tmp_path / "quantized", json.dumps(config | {"quantization_config": section}), quantized
        ),
        write(tmp_path / "plain", json.dumps(config), plain),
    )
    inputs = random_image("llava", 0).load_inputs()
    embedded, expected = (tower_of(folder)([inputs]) for folder in folders)
    assert torch.equal(embedded, expected)
    assert not torch.equal(embedded, tower_of(whole)([inputs]))


def bits_of_rows(
    loaded: LoadedModel, family: str, rows: list[int], max_tokens: int
) -> dict[int, str]:
    """Run rows together, and return the exact log-probability of each row, in hexadecimal."""
    tower = tower_of(loaded.folder).to(getattr(torch, loaded.dtype))
    images = ImageEmbeddings(tower, 2**20, decoder_layers_of(loaded.model))
    setup = Setup(caching=False, max_tokens=max_tokens)
    engine, scheduler = make_engine(loaded, setup, images)
    params = SamplingParams(
        max_tokens=OUTPUT_TOKENS, temperature=0.0, logit_bias={IMAGE_TOKEN: -100.0}
    )
    for row in rows:
        engine.add_request(Row(family, row).request(row, params))
    completions, _ = run_engine(engine, scheduler, setup)
    return {
        row: float(done.outputs[0].cumulative_logprob).hex() for row, done in completions.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family",
    [
        "qwen3_vl",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("qwen3_vl_moe", "glm4v_moe", "qwen3_5_moe", "gemma4")
        ),
    ],
)
def test_bits_of_rows_do_not_depend_on_their_batch(family: str, dtype: str, tmp_path: Path) -> None:
    """Rows of text share steps with images, for which DeepStack changes the outputs of layers.

    In mixtures of experts, rows share the experts' matrices, and the router sees all of a step's
    tokens at once.
    """
    folder = make_vision_checkpoint(family, tmp_path)
    loaded = load_model(
        ModelConfig(str(folder), dtype=dtype),
        device=CPU,
        kernels=KernelRequirements(deterministic=True),
    )
    rows = list(range(len(ROWS)))
    together = bits_of_rows(loaded, family, rows, max_tokens=512)
    assert bits_of_rows(loaded, family, rows[::-1], max_tokens=7) == together
    for row in rows:
        assert bits_of_rows(loaded, family, [row], max_tokens=512) == {row: together[row]}


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_bytes_of_towers_are_known_before_they_are_loaded(family: str, tmp_path: Path) -> None:
    folder = make_vision_checkpoint(family, tmp_path)
    num_bytes = sum(parameter.nbytes for parameter in tower_of(folder).parameters())
    assert vision_tower_bytes(AutoConfig.from_pretrained(folder), "float32") == num_bytes


def test_towers_have_no_parts_for_sound(tmp_path: Path) -> None:
    folder = make_vision_checkpoint("gemma4_e4b", tmp_path)
    assert any("audio" in name for name in load_file(folder / "model.safetensors"))
    assert not any("audio" in name for name, _ in tower_of(folder).named_parameters())


def test_images_of_other_families_are_not_supported(tmp_path: Path) -> None:
    assert load_vision_tower(tmp_path, AutoConfig.for_model("paligemma"), "float32", CPU) is None


def test_models_published_with_code_run_without_it(tmp_path: Path) -> None:
    """Baidu's Unlimited-OCR has other keys and another class than transformers' config."""
    folder = make_vision_checkpoint("unlimited_ocr", tmp_path)
    path = folder / "config.json"
    published = json.loads(path.read_text())
    text = published.pop("text_config")
    for name in ("layer_types", "mlp_layer_types", "sliding_window"):
        del text[name]
    published |= {
        "architectures": ["UnlimitedOCRForCausalLM"],
        "auto_map": {"AutoModel": "modeling_unlimitedocr.UnlimitedOCRForCausalLM"},
        "language_config": {**text, "first_k_dense_replace": 1},
        "sliding_window": 5,
    }
    path.write_text(json.dumps(published))
    loaded = load_model(ModelConfig(str(folder)), device=CPU)
    assert loaded.layout(16).prompt_windows == (5, 5, 5)
    assert tower_of(folder)([random_image("unlimited_ocr", 1).load_inputs()]).isfinite().all()


def test_paddleocr_vl_is_published_with_a_flat_config(tmp_path: Path) -> None:
    folder = make_vision_checkpoint("paddleocr_vl", tmp_path)
    path = folder / "config.json"
    published = json.loads(path.read_text())
    text = published.pop("text_config")
    del text["model_type"]
    published["vision_config"]["model_type"] = "paddleocr_vl"
    path.write_text(json.dumps(text | published | {"auto_map": {"AutoConfig": "x.Config"}}))
    loaded = load_model(ModelConfig(str(folder)), device=CPU)
    assert loaded.layout(16).num_layers == 3
    assert tower_of(folder)([random_image("paddleocr_vl", 1).load_inputs()]).isfinite().all()


def test_wrong_numbers_of_embeddings_are_refused(tmp_path: Path) -> None:
    """DeepSeek-OCR-2 makes as many embeddings as it has queries, whatever the processor counts."""
    images = ImageEmbeddings(tower_of(make_vision_checkpoint("llava", tmp_path)), 2**20)
    image = Image(0, random_image("llava", 0).load_inputs, num_tokens=15)
    step = StepImage(image, 0, np.arange(15, dtype=np.int32))
    with pytest.raises(ModelError, match="16 embeddings for images with 15 tokens"):
        images.put([step], torch.zeros(15, 64))


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3_vl", (27 * 1152, math.inf)),
        ("qwen2_5_vl", (4 * 3584, math.inf)),
        ("llava", (24 * 1024, 24 * 24)),
        ("internvl", (24 * 1024, 32 * 32)),
    ],
)
def test_attention_size_counts_full_layers_and_the_patches_of_a_tile(
    family: str, expected: tuple[int, float]
) -> None:
    assert attention_size(AutoConfig.for_model(family)) == expected
