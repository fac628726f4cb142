"""The models of the matrix: tiny random checkpoints with the layers of models that many people run.

``python -m tests.proof.checkpoints MODEL FOLDER`` writes one. This is a program of its own because
a process that has computed with torch must not fork.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Checkpoint:
    """A tiny checkpoint."""

    stands_for: str
    """The published models with these layers."""
    sees: bool = False
    """True if the rows of its jobs hold images."""


CHECKPOINTS = {
    "qwen3_5": Checkpoint("Qwen3.5, Qwen3.6 (dense)", sees=True),
    "qwen3_5_moe_text": Checkpoint("Qwen3.6-35B-A3B (text)"),
    "qwen3_next": Checkpoint("Qwen3-Next, Qwen3-Coder-Next"),
    "qwen3_vl": Checkpoint("Qwen3-VL", sees=True),
    "qwen2_5_vl": Checkpoint("Qwen2.5-VL", sees=True),
    "gemma4": Checkpoint("Gemma 4", sees=True),
    "gemma3": Checkpoint("Gemma 3", sees=True),
    "glm_ocr": Checkpoint("GLM-OCR", sees=True),
    "deepseek_ocr2": Checkpoint("DeepSeek-OCR-2", sees=True),
    "gpt_oss": Checkpoint("gpt-oss"),
    "qwen3": Checkpoint("Qwen3 (dense)"),
    "llama": Checkpoint("Llama 3, SmolLM3"),
    "nemotron_h": Checkpoint("Nemotron 3"),
    "granitemoehybrid": Checkpoint("Granite 4"),
    "deepseek_v3": Checkpoint("DeepSeek V3, Kimi K2"),
}


def main(name: str, folder: str) -> None:
    if CHECKPOINTS[name].sees:
        from tests.vision_folders import make_vision_folder

        make_vision_folder(name, Path(folder))
    else:
        from tests.models import make_text_model

        make_text_model(Path(folder), name, max_position_embeddings=512)


if __name__ == "__main__":
    main(*sys.argv[1:])
