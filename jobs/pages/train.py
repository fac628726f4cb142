"""Trains the reader of delivery notes and bar charts, starting from the reader of labels.

Every batch has new pictures.

    python jobs/pages/train.py        # reads jobs/labels/model/, writes jobs/pages/model/
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from draw import HEIGHT, WIDTH, Picture, draw_chart, draw_note
from transformers import PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HERE = Path(__file__).resolve().parent
START = HERE.parent / "labels" / "model"
IM_END, PAD = "<|im_end|>", "<|image_pad|>"
TASKS = {"Read the note as JSON.": draw_note, "Describe the chart.": draw_chart}


@dataclass(frozen=True)
class Batch:
    """Prompts of one task with their answers; shorter answers are padded."""

    ids: torch.Tensor  # [rows, length]
    pixels: torch.Tensor  # [rows * patches, values]
    grids: torch.Tensor  # [rows, 3]
    answers: torch.Tensor  # [rows, answer length]; -100 = padding


class Encoder:
    """Makes batches of pictures."""

    def __init__(self, start: Path) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(start)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(start)
        self.processor.size["longest_edge"] = 2 * WIDTH * HEIGHT

    def encode(self, question: str, pictures: list[Picture]) -> Batch:
        images = self.processor([picture.image.convert("RGB") for picture in pictures])
        grids = torch.as_tensor(images["image_grid_thw"])
        num_tokens = int(grids[0].prod()) // self.processor.merge_size**2
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        prompt = self.tokenizer.encode(text.replace(PAD, PAD * num_tokens))
        answers = [self.tokenizer.encode(picture.answer + IM_END) for picture in pictures]
        longest = max(map(len, answers))
        ids = torch.tensor([prompt + each + [0] * (longest - len(each)) for each in answers])
        wanted = torch.tensor([each + [-100] * (longest - len(each)) for each in answers])
        return Batch(ids[:, :-1], torch.as_tensor(images["pixel_values"]), grids, wanted)


def answer_logits(model: Qwen3VLForConditionalGeneration, batch: Batch) -> torch.Tensor:
    """Return the logits of the answer's tokens: [rows, answer length, vocabulary]."""
    rows = len(batch.ids)
    is_image = batch.ids == model.config.image_token_id
    position_ids, _ = model.model.get_rope_index(batch.ids[:1], is_image[:1].int(), batch.grids[:1])
    return model(
        input_ids=batch.ids,
        pixel_values=batch.pixels,
        image_grid_thw=batch.grids,
        position_ids=position_ids.expand(-1, rows, -1),
        logits_to_keep=batch.answers.shape[1],
        use_cache=False,
    ).logits


@torch.no_grad()
def exact_match(model: Qwen3VLForConditionalGeneration, batch: Batch) -> float:
    """Return the share of pictures whose greedy answer is right: each of its tokens is the most
    likely one after the previous tokens."""
    drawn = answer_logits(model, batch).argmax(-1)
    return float(((drawn == batch.answers) | (batch.answers == -100)).all(-1).float().mean())


def save(model: Qwen3VLForConditionalGeneration, encoder: Encoder, folder: Path) -> None:
    """Save the model, in bfloat16, and its processor."""
    half = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder, state_dict=half)
    encoder.tokenizer.save_pretrained(folder)
    encoder.processor.save_pretrained(folder)
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "Qwen3VLProcessor"}, indent=2) + "\n"
    )


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng, held_out = random.Random(args.seed), random.Random(args.seed)
    encoder = Encoder(args.start)
    checks = [
        encoder.encode(question, [draw(held_out, "rows") for _ in range(128)])
        for question, draw in TASKS.items()
    ]
    model = Qwen3VLForConditionalGeneration.from_pretrained(args.start, dtype=torch.float32)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    started, losses = time.monotonic(), [0.0, 0.0]
    for step in range(args.steps):
        rising = min(1.0, (step + 1) / args.warmup)
        falling = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rising * falling
        optimizer.zero_grad()
        for at, (question, draw) in enumerate(TASKS.items()):
            batch = encoder.encode(question, [draw(rng, "train") for _ in range(args.rows)])
            logits = answer_logits(model, batch).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, batch.answers.flatten())
            loss.backward()
            losses[at] += loss.item() / args.log_every
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % args.log_every == 0:
            seconds = time.monotonic() - started
            print(f"{step + 1} {seconds:.0f}s loss {losses[0]:.4f} {losses[1]:.4f}", flush=True)
            losses = [0.0, 0.0]
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            right = [exact_match(model, check) for check in checks]
            print(f"{step + 1} held out {right[0]:.4f} {right[1]:.4f}", flush=True)
            save(model, encoder, args.output)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train the reader of delivery notes and bar charts.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option("--start", type=Path, default=START, help="folder of the first weights")
    option("--output", type=Path, default=HERE / "model")
    option("--seed", type=int, default=1)
    option("--threads", type=int, default=1)
    option("--steps", type=int, default=2_000)
    option("--rows", type=int, default=24, help="pictures of each task per step")
    option("--lr", type=float, default=1.5e-3)
    option("--warmup", type=int, default=50)
    option("--log-every", type=int, default=25)
    option("--save-every", type=int, default=200)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
