"""Measures NVFP4 on a CPU: the time of products, and the memory of loading a mixture of experts.

python benchmarks/nvfp4.py products
python benchmarks/nvfp4.py write FOLDER --layers 16
python benchmarks/nvfp4.py load FOLDER --quantization int8

``write`` writes random weights in the sizes of Qwen3.6-35B-A3B: 0.48 GB for each layer, plus 2 GB.
Run ``load`` in a separate process, because memory that ``write`` has freed would change the result.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from batchinfer.config import ModelConfig
from batchinfer.kernels.cpu import gemm
from batchinfer.kernels.low_bit import Int4Weight
from batchinfer.worker.linear.prequantized_loader import as_codes
from batchinfer.worker.loader import load_model
from batchinfer.worker.model.meta_model import build_on_meta
from batchinfer.worker.model.quantized.float4 import FLOAT4
from batchinfer.worker.model.quantized.low_bit import TableWeight

SHAPES = ((1024, 2048), (2048, 512), (4096, 4096))
ROUNDS = 12
NOT_QUANTIZED = ("in_proj_a", "in_proj_b")


def measure_products() -> Iterator[dict[str, object]]:
    """Yield the best times of products, as fractions of the time with bfloat16 weights."""
    torch.set_num_threads(1)
    for outputs, width in SHAPES:
        weight = torch.randn(outputs, width)
        codes = torch.randint(0, 16, (outputs, width), dtype=torch.uint8)
        scales = torch.rand(outputs, width // 16).to(torch.float8_e4m3fn)
        nvfp4 = as_codes(TableWeight(codes, FLOAT4, scales, torch.ones(outputs)))
        assert isinstance(nvfp4, Int4Weight)
        packed = {
            "bfloat16": gemm.pack(weight.bfloat16()),
            "int4": gemm.pack_low_bit(Int4Weight.rounded(weight, 64)),
            "nvfp4": gemm.pack_low_bit(nvfp4),
        }
        for rows in (1, 8, 64, 256):
            x, best = torch.randn(rows, width).bfloat16(), dict.fromkeys(packed, float("inf"))
            out = torch.empty(rows, outputs, dtype=torch.bfloat16)
            for _ in range(ROUNDS):
                for name, each in packed.items():
                    began = time.perf_counter()
                    for _ in range(3):
                        gemm.gemm(x, each, None, out=out)
                    best[name] = min(best[name], time.perf_counter() - began)
            times = {name: round(took / best["bfloat16"], 2) for name, took in best.items()}
            yield {"outputs": outputs, "width": width, "rows": rows, **times}


def write_model(folder: Path, layers: int) -> None:
    """Write random weights in ModelOpt's layout of NVFP4, one file for each layer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen3_5MoeTextConfig(num_hidden_layers=layers)  # otherwise the sizes of 35B-A3B
    values = config.to_dict() | {"architectures": ["Qwen3_5MoeForCausalLM"], "dtype": "bfloat16"}
    values |= {"layer_types": values["layer_types"][:layers], "eos_token_id": 1}
    values["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (folder / "config.json").write_text(json.dumps(values, default=str))
    shapes: defaultdict[str, dict[str, torch.Size]] = defaultdict(dict)
    for name, weight in build_on_meta(config).named_parameters():
        layer = name.partition("layers.")[2].partition(".")[0] or "other"
        shapes[layer][name] = weight.shape
    weight_map: dict[str, str] = {}
    for layer, by_name in shapes.items():
        tensors = {
            each: tensor for name, shape in by_name.items() for each, tensor in saved(name, shape)
        }
        file = f"model-{layer}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def saved(name: str, shape: torch.Size) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a parameter in ModelOpt's layout."""
    if ".experts." in name:
        module, _, matrix = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
        for expert in range(shape[0]):
            for part in parts:
                of_part = torch.Size((shape[1] // len(parts), shape[2]))
                yield from quantized(f"{module}.{expert}.{part}.weight", of_part)
    elif "_proj" in name and not any(part in name for part in NOT_QUANTIZED):
        yield from quantized(name, shape)
    else:
        yield name, (torch.randn(shape) * 0.02).bfloat16()


def quantized(name: str, shape: torch.Size) -> Iterator[tuple[str, torch.Tensor]]:
    outputs, width = shape
    yield name, torch.randint(0, 256, (outputs, width // 2), dtype=torch.uint8)
    yield f"{name}_scale", (torch.rand(outputs, width // 16) * 100 + 50).to(torch.float8_e4m3fn)
    yield f"{name}_scale_2", torch.tensor(7e-5)


def measure_loading(folder: Path, quantization: str) -> dict[str, object]:
    """Load the model. Return the seconds, and the growth in GB of memory that is not mapped from a
    file."""
    process, is_done, peak = psutil.Process(), threading.Event(), 0

    def used() -> int:
        memory = process.memory_info()
        return int(memory.rss - memory.shared)

    before = used()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.02):
            peak = max(peak, used())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    try:
        choice = ModelConfig(str(folder), quantization=quantization)
        loaded = load_model(choice, device=torch.device("cpu"))
    finally:
        is_done.set()
        watcher.join()
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "parameters": loaded.facts["parameters"],
        "weights_gb": loaded.facts["weight_bytes"] / 1e9,
        "peak_gb": (peak - before) / 1e9,
        "after_gb": (used() - before) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("products", "write", "load"))
    parser.add_argument("folder", nargs="?", type=Path, help="folder for the model")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--quantization", default="int8")
    args = parser.parse_args()
    if args.what == "products":
        for line in measure_products():
            print(json.dumps(line), flush=True)
        return
    if args.folder is None:
        parser.error(f"{args.what} needs a folder for the model")
    if args.what == "write":
        write_model(args.folder, args.layers)
    else:
        print(json.dumps(measure_loading(args.folder, args.quantization)))


if __name__ == "__main__":
    main()
