"""Trains two adapters for the quickstart's model, and writes rows that use them.

The model answers in JSON. With the adapter `lines`, it answers with one line per value; with the
adapter `first`, it answers with the first value only.

    python jobs/adapters/train.py        # writes lines/, first/ and rows.parquet next to this file
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"
sys.path.insert(0, str(QUICKSTART))
from make_data import INSTRUCTIONS, Row, training_rows  # noqa: E402

STEPS, ROWS_PER_STEP, RATE = 400, 16, 4e-3
NUM_ROWS = 96


def lines(answer: dict[str, str]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in answer.items())


def first(answer: dict[str, str]) -> str:
    return next(iter(answer.values()))


ADAPTERS = {"lines": lines, "first": first}


def json_rows(seed: int) -> Iterator[Row]:
    """Yield an endless sequence of rows with JSON answers."""
    return (row for row in training_rows(seed) if row.answer.startswith("{"))


def train(name: str) -> None:
    """Train an adapter to give the answers of its function in ``ADAPTERS``; save it in 16 bits."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    base = AutoModelForCausalLM.from_pretrained(QUICKSTART / "model", dtype=torch.float32)
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    rows = json_rows(seed=list(ADAPTERS).index(name) + 100)
    for step in range(STEPS):
        texts, starts = [], []
        for row in islice(rows, ROWS_PER_STEP):
            messages = [
                {"role": "system", "content": INSTRUCTIONS[row.task]},
                {"role": "user", "content": row.document},
            ]
            prompt = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            answer = ADAPTERS[name](json.loads(row.answer))
            starts.append(len(tokenizer.encode(prompt, add_special_tokens=False)))
            texts.append(f"{prompt}{answer}<|im_end|>")
        batch = tokenizer(
            texts,
            add_special_tokens=False,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        for label, start in zip(labels, starts, strict=True):
            label[:start] = -100
        loss = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0:
            print(f"{name} step {step}: loss {loss.item():.3f}", flush=True)
    model.peft_config["default"].base_model_name_or_path = "quickstart/model"
    model.to(torch.bfloat16).save_pretrained(str(HERE / name))
    (HERE / name / "README.md").unlink()  # an empty template


def write_rows() -> None:
    """Write rows of the quickstart, each with the name of an adapter or null."""
    rows = pq.read_table(QUICKSTART / "prompts.parquet").to_pylist()
    chosen = [row for row in rows if row["answer"].startswith("{")][:NUM_ROWS]
    for row, name in zip(chosen, cycle((None, *ADAPTERS)), strict=False):
        row["adapter"] = name
        if name is not None:
            row["answer"] = ADAPTERS[name](json.loads(row["answer"]))
    random.Random(0).shuffle(chosen)
    pq.write_table(pa.Table.from_pylist(chosen), HERE / "rows.parquet", compression="zstd")


if __name__ == "__main__":
    write_rows()
    for adapter in ADAPTERS:
        train(adapter)
