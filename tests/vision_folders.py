"""Folders of tiny random vision-language models, complete with tokenizer and image processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    DeepseekOcr2ImageProcessorPil,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from batchinfer.text.images.gemma4_unified import NAME
from batchinfer.text.images.lfm2_vl import Lfm2VlImageProcessorPil
from batchinfer.text.images.unlimited_ocr import UnlimitedOcrImageProcessorPil
from tests.vision_models import make_vision_checkpoint

_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_TOKENS = {
    "llava": {"image_token": "<image>"},
    "internvl": {
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    },
    "gemma3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    "qwen2_5_vl": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    },
}
_TOKENS["glm4v"] = _TOKENS["glm4v_moe"] = _TOKENS["glm_ocr"] = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "begin_of_image_token": "<|begin_of_image|>",
    "end_of_image_token": "<|end_of_image|>",
}
for _family in ("gemma4", "gemma4_e4b", "gemma4_unified"):
    _TOKENS[_family] = {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    }
_TOKENS["mistral3"] = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
_TOKENS["qwen3_vl"] = _TOKENS["qwen3_5"] = _TOKENS["qwen2_5_vl"]
_TOKENS["lfm2_vl"] = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}
_TOKENS["paddleocr_vl"] = {"image_token": "<|IMAGE_PLACEHOLDER|>"}
_TOKENS["deepseek_ocr2"] = _TOKENS["unlimited_ocr"] = {"image_token": "<image>"}
_WRITTEN = {
    "lfm2_vl": "<image>",
    "deepseek_ocr2": "<image>",
    "paddleocr_vl": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    "unlimited_ocr": "<image>",
    "llava": "<image>",
    "internvl": "<IMG_CONTEXT>",
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
    "gemma4_e4b": "<|image|>",
    "gemma4_unified": "<|image|>",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
    "glm4v_moe": "<|begin_of_image|><|image|><|end_of_image|>",
    "glm_ocr": "<|begin_of_image|><|image|><|end_of_image|>",
    "mistral3": "[IMG]",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
}
"""Texts that the chat templates write for an image."""
_TEMPLATE = (
    "{%% for m in messages %%}<|im_start|>{{ m.role }}\n"
    "{%% if m.content is string %%}{{ m.content }}{%% else %%}{%% for part in m.content %%}"
    "{%% if part.type == 'text' %%}{{ part.text }}{%% else %%}%s{%% endif %%}"
    "{%% endfor %%}{%% endif %%}<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
_PATCHES = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
_PROCESSORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llava": (
        CLIPImageProcessorPil(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, do_convert_rgb=True
        ),
        {
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "internvl": (
        GotOcr2ImageProcessorPil(
            size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=4
        ),
        {"image_seq_length": 4},
    ),
    "gemma3": (
        Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
        {"image_seq_length": 4},
    ),
    "qwen2_5_vl": (
        Qwen2VLImageProcessorPil(size={"shortest_edge": 256, "longest_edge": 16384}, **_PATCHES),
        {},
    ),
}
_PROCESSORS["glm4v"] = _PROCESSORS["glm4v_moe"] = (
    Glm4vImageProcessorPil(size={"shortest_edge": 512, "longest_edge": 16384}, **_PATCHES),
    {},
)
_PROCESSORS["glm_ocr"] = (
    Glm46VImageProcessorPil(size={"shortest_edge": 512, "longest_edge": 16384}, **_PATCHES),
    {},
)
_PROCESSORS["mistral3"] = (
    PixtralImageProcessorPil(patch_size=8, size={"longest_edge": 64}),
    {"patch_size": 8, "spatial_merge_size": 2},
)
_PROCESSORS["qwen3_vl"] = _PROCESSORS["qwen3_5"] = _PROCESSORS["qwen2_5_vl"]
_PROCESSORS["gemma4"] = (
    Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70),
    {},
)
_PROCESSORS["gemma4_e4b"] = _PROCESSORS["gemma4_unified"] = _PROCESSORS["gemma4"]
_PROCESSORS["paddleocr_vl"] = (
    PaddleOCRVLImageProcessorPil(
        size={"shortest_edge": 512, "longest_edge": 16384}, patch_size=8, merge_size=2
    ),
    {},
)
_PROCESSORS["deepseek_ocr2"] = (
    DeepseekOcr2ImageProcessorPil(size={"height": 80, "width": 80}, tile_size=80),
    {"patch_size": 7, "downsample_ratio": 1},  # 144 tokens
)
_PROCESSORS["lfm2_vl"] = (
    Lfm2VlImageProcessorPil(
        encoder_patch_size=8, tile_size=32, min_image_tokens=2, max_image_tokens=6, max_tiles=4
    ),
    {},
)
_PROCESSORS["unlimited_ocr"] = (
    UnlimitedOcrImageProcessorPil(
        size={"height": 64, "width": 64}, tile_size=32, max_patches=4, maximum_pad_value=32
    ),
    {"patch_size": 8, "downsample_ratio": 4},
)
CLASSES = {
    "lfm2_vl": "Lfm2VlProcessor",
    "deepseek_ocr2": "DeepseekOcr2Processor",
    "paddleocr_vl": "PaddleOCRVLProcessor",
    "unlimited_ocr": "UnlimitedOcrProcessor",
    "llava": "LlavaProcessor",
    "internvl": "InternVLProcessor",
    "gemma3": "Gemma3Processor",
    "gemma4": "Gemma4Processor",
    "gemma4_e4b": "Gemma4Processor",
    "gemma4_unified": "Gemma4UnifiedProcessor",
    "glm4v": "Glm4vProcessor",
    "glm4v_moe": "Glm4vProcessor",
    "glm_ocr": "Glm46VProcessor",
    "mistral3": "PixtralProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_5": "Qwen3VLProcessor",
}
PROCESSOR_FAMILIES = tuple(_PROCESSORS)


def make_vision_folder(family: str, folder: Path) -> Path:
    """Write a tiny random model with its tokenizer and image processor."""
    ids = add_processor(family, folder)
    token_id = ids["context_image_token" if family == "internvl" else "image_token"]
    return make_vision_checkpoint(family, folder, image_token=token_id, vocab_size=300)


def add_processor(family: str, folder: Path) -> dict[str, int]:
    """Write a byte tokenizer and an image processor; return the ids of the named tokens."""
    names = _TOKENS[family]
    specials = ["<s>", "<|im_start|>", "<|im_end|>", *names.values()]
    vocabulary = {text: at for at, text in enumerate([*specials, *_BYTES])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<s>",
        additional_special_tokens=["<s>", "<|im_start|>"],
        extra_special_tokens=names,
        chat_template=_TEMPLATE % _WRITTEN[family],
    )
    tokenizer.save_pretrained(folder)
    processor, settings = _PROCESSORS[family]
    processor.save_pretrained(folder)
    if family == "gemma4_unified":  # transformers' class needs torchvision
        path = folder / "preprocessor_config.json"
        values = json.loads(path.read_text()) | {"image_processor_type": NAME}
        path.write_text(json.dumps(values))
    path = folder / "processor_config.json"
    path.write_text(json.dumps({"processor_class": CLASSES[family], **settings}))
    return {name: vocabulary[text] for name, text in names.items()}
