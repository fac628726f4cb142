"""Write the page of supported and refused models by loading each family's default config.

.venv/bin/python docs/make_models.py
"""

from __future__ import annotations

import json
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

from batchinfer.config.model import ENCODER_FAMILIES
from batchinfer.errors import ModelError
from batchinfer.pooling.classifier import HEADED_FAMILIES
from batchinfer.worker.model.config import load_config
from batchinfer.worker.model.language_model import headless_names, is_wrapper
from batchinfer.worker.vision.tower import FAMILIES

PAGE = Path(__file__).resolve().parent / "models.md"

MODELS = {
    "afmoe": "Trinity",
    "apertus": "Apertus",
    "cohere2": "Command A, Command R7B",
    "deepseek_ocr2": "DeepSeek-OCR-2",
    "deepseek_v2": "DeepSeek V2, V2-Lite",
    "deepseek_v3": "DeepSeek V3, R1; Kimi K2",
    "deepseek_v32": "DeepSeek V3.2",
    "ernie4_5": "Ernie 4.5",
    "ernie4_5_moe": "Ernie 4.5, with experts",
    "ernie4_5_vl_moe": "Ernie 4.5 VL",
    "exaone4": "EXAONE 4",
    "falcon_h1": "Falcon-H1",
    "falcon_mamba": "Falcon-Mamba",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3, 4B and larger",
    "gemma3_text": "Gemma 3, 1B and 270M",
    "gemma3n_text": "Gemma 3n's language model",
    "gemma4": "Gemma 4, except 12B",
    "gemma4_text": "Gemma 4's language model",
    "gemma4_unified": "Gemma 4, 12B",
    "glm4": "GLM 4",
    "glm4_moe": "GLM 4.5, 4.6, 4.7",
    "glm4_moe_lite": "GLM 4.7-Flash",
    "glm4v": "GLM 4.1V",
    "glm4v_moe": "GLM 4.5V",
    "glm_moe_dsa": "GLM 5",
    "glm_ocr": "GLM-OCR",
    "gpt2": "GPT-2",
    "gpt_oss": "gpt-oss",
    "granite": "Granite 3",
    "granitemoehybrid": "Granite 4",
    "hunyuan_v1_dense": "Hunyuan",
    "hunyuan_v1_moe": "Hunyuan A13B",
    "internvl": "InternVL",
    "jamba": "Jamba",
    "kimi_k25": "Kimi K2.5, K2.6",
    "kimi_linear": "Kimi Linear",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2, with experts",
    "lfm2_vl": "LFM2-VL",
    "lfm3": "LFM3",
    "llama": "Llama 1 to 3, and many others",
    "llama4": "Llama 4",
    "llava": "LLaVA",
    "longcat_flash": "LongCat Flash",
    "mamba": "Mamba",
    "mamba2": "Mamba-2, Codestral Mamba",
    "mimo_v2_flash": "MiMo V2 Flash",
    "minimax_m2": "MiniMax M2",
    "ministral3": "Ministral 3's language model",
    "mistral": "Mistral 7B",
    "mistral3": "Mistral Small 3.x, Ministral 3",
    "mistral_large4": "Mistral Large 4",
    "mixtral": "Mixtral",
    "molmo2": "Molmo 2",
    "nemotron_h": "Nemotron 3, Nemotron-H",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "paddleocr_vl": "PaddleOCR-VL",
    "paligemma": "PaliGemma",
    "phi3": "Phi 3, Phi 4",
    "qwen2": "Qwen 2, 2.5; DeepSeek R1 Distill",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen2_vl": "Qwen2-VL",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen3.5, Qwen3.6",
    "qwen3_5_moe": "Qwen3.5 and 3.6, with experts",
    "qwen3_moe": "Qwen3 with experts, Qwen3-Coder",
    "qwen3_next": "Qwen3-Next, Qwen3-Coder-Next",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL with experts",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
    "starcoder2": "StarCoder 2",
    "step3p7": "Step 3.7",
    "unlimited_ocr": "Unlimited-OCR",
    "voxtral": "Voxtral",
}
"""The common name of each transformers family."""

_LATENT = "caches expanded keys and values, or latents (`engine.latent_cache`)"
_NOTES = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "kimi_k25": _LATENT,
    "kimi_linear": _LATENT,
    "glm4_moe_lite": _LATENT,
}

_SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["sparse"] * 32, "num_experts_per_tok": 6}}
}
"""Settings of families whose default configs are incomplete."""

_HEAD = """\
# Which models run

A model runs if transformers has a class for its family, and the KV pool can hold the keys and
values, or the states, of its layers. Weights must be in safetensors. batchinfer never runs code
from a model's folder. To find out whether a model runs before you rent a machine, use `batchinfer
plan`. When batchinfer loads a model, it compares the logits of a few tokens with the logits of
transformers' own attention, and refuses the model if the logits differ.

Models marked "runs, with images" take [images in prompts](images.md). Other vision and audio models
run on text prompts, because only their language model is loaded; a row with an image gets the error
`unsupported_content`.

The last column has the tasks of models without an output head: `embed`, and `classify` for models
with the head of a `...ForSequenceClassification` class.

| models | family (`model_type`) | support | tasks without an output head |
|---|---|---|---|
"""

_ENCODERS = {
    "bert": "BERT, MiniLM, BGE, E5, GTE, MixedBread",
    "camembert": "CamemBERT",
    "distilbert": "DistilBERT",
    "electra": "ELECTRA",
    "eurobert": "EuroBERT",
    "modernbert": "ModernBERT, GTE ModernBERT",
    "mpnet": "MPNet, all-mpnet-base-v2",
    "nomic_bert": "Nomic Embed",
    "roberta": "RoBERTa",
    "xlm-roberta": "XLM-R, BGE-M3, multilingual E5, BGE rerankers",
}
"""The common names of encoder families."""

_WHOLE = """
## Encoders

Encoders generate no text and have no KV pool ([embeddings, labels, rerankers](embeddings.md)).
Bidirectional decoders run in the same way, but only with `embed`: EmbeddingGemma (`gemma3_text`
with `use_bidirectional_attention`), and GTE-Qwen and others with `is_causal: false`.

| models | family (`model_type`) | tasks |
|---|---|---|
"""

_TAIL = f"""
Other families with the same structure run too. The error for a refused family gives the reason.

Generated by `docs/make_models.py` with transformers {transformers.__version__}.
"""

_REASON = re.compile(r"cannot be run: (.*)$", re.DOTALL)


def page_text() -> str:
    """Return the text of ``docs/models.md``."""
    rows = sorted(MODELS.items(), key=lambda item: item[1].lower())
    lines = (f"| {name} | `{one}` | {answer(one)} | {tasks(one)} |\n" for one, name in rows)
    encoders = sorted(_ENCODERS.items(), key=lambda item: item[1].lower())
    whole = (f"| {name} | `{one}` | {encoder_tasks(one)} |\n" for one, name in encoders)
    return "".join((_HEAD, *lines, _WHOLE, *whole, _TAIL))


def tasks(family: str) -> str:
    """Return the tasks of a decoder without an output head, or with a classification head."""
    if answer(family).startswith("refused"):
        return ""
    found = set(headless_names(CONFIG_MAPPING[family]()).values())
    return ", ".join(f"`{task}`" for task in ("embed", "classify") if task in found)


def encoder_tasks(family: str) -> str:
    """Return the tasks of an encoder family."""
    assert family in ENCODER_FAMILIES
    return "`embed`, `classify`" if family in HEADED_FAMILIES else "`embed`"


@cache
def answer(family: str) -> str:
    """Return whether a family runs with its default config, or why it is refused."""
    config = CONFIG_MAPPING[family](**_SETTINGS.get(family, {}))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(_saved(config)))
        try:
            load_config(Path(folder))
        except ModelError as error:
            found = _REASON.search(str(error))
            return f"refused: {found.group(1) if found else error}"
    note = _NOTES.get(family)
    runs = "its language model runs" if is_wrapper(config) else "runs"
    if family in FAMILIES:
        runs = "runs, with images"
    return f"{runs}; {note}" if note else runs


def _saved(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


if __name__ == "__main__":
    PAGE.write_text(page_text())
