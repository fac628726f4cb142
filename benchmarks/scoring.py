"""Compares a scoring job with transformers, on rows with a long context and four short choices.

    python benchmarks/scoring.py FOLDER [--rows 200] [--context 256] [--batch 32]

Both programs run the model ``small`` of models.py in float32. The job has ``task: score``. The
job's time does not include loading the model. transformers runs its forward pass over left-padded
batches of contexts and choices, and computes logits only for the choices. Checks that
log-likelihoods agree within 1e-4 per token, and prints a JSON line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from models import make_small
from transformers import AutoModelForCausalLM
from workloads import FIRST_ID, LAST_ID

from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job

CHOICES = 4
CLOSE = 1e-4

Row = tuple[list[int], list[list[int]]]


def make_rows(count: int, context: int) -> list[Row]:
    """Return random rows. A context has ``context`` tokens, plus or minus an eighth; a choice has 2
    to 8 tokens."""
    rng = np.random.default_rng(0)

    def ids(shortest: int, longest: int) -> list[int]:
        return rng.integers(FIRST_ID, LAST_ID, rng.integers(shortest, longest + 1)).tolist()

    return [
        (ids(context * 7 // 8, context * 9 // 8), [ids(2, 8) for _ in range(CHOICES)])
        for _ in range(count)
    ]


def by_job(model: Path, rows: list[Row], folder: Path) -> tuple[float, list[list[float]], Any]:
    """Return seconds, log-likelihoods and the summary."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    contexts, choices = (list(column) for column in zip(*rows, strict=True))
    pq.write_table(pa.table({"context": contexts, "choices": choices}), folder / "rows.parquet")
    (folder / "job.yaml").write_text(
        "task: score\n"
        f"model: {{name: {model.resolve()}, dtype: float32}}\n"
        "input: {path: rows.parquet}\n"
        "prompt: {token_ids_column: context}\n"
        "score: {completions_column: choices}\n"
        "output: {path: out}\n"
    )
    run_job(load_job(folder / "job.yaml"), quiet=True)
    summary = json.loads((folder / "out" / "summary.json").read_bytes())
    found = pq.read_table(folder / "out" / "data").to_pylist()
    scores = [[score["sum_logprob"] for score in row["score"]] for row in found]
    return summary["time_s"]["engine"], scores, summary


@torch.inference_mode()
def by_transformers(model: Path, rows: list[Row], batch: int) -> tuple[float, list[list[float]]]:
    """Return seconds and log-likelihoods."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    pairs = [
        (len(context) + len(choice), row, at)
        for row, (context, choices) in enumerate(rows)
        for at, choice in enumerate(choices)
    ]
    pairs.sort()
    scores = [[0.0] * CHOICES for _ in rows]
    began = time.perf_counter()
    for start in range(0, len(pairs), batch):
        chosen = pairs[start : start + batch]
        longest = max(length for length, _, _ in chosen)
        ids = torch.zeros((len(chosen), longest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for place, (length, row, at) in enumerate(chosen):
            ids[place, longest - length :] = torch.tensor(rows[row][0] + rows[row][1][at])
            mask[place, longest - length :] = 1
        kept = max(len(rows[row][1][at]) for _, row, at in chosen) + 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = reference(
            input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=kept
        ).logits.log_softmax(-1)
        for place, (_, row, at) in enumerate(chosen):
            choice = torch.tensor(rows[row][1][at])
            own = logits[place, -1 - len(choice) : -1]
            scores[row][at] = float(own.gather(1, choice[:, None]).double().sum())
    return time.perf_counter() - began, scores


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare scoring with transformers.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    model = make_small(args.folder / "small")
    rows = make_rows(args.rows, args.context)
    by_job(model, rows[:2], args.folder / "scoring")
    ours_s, ours, summary = by_job(model, rows, args.folder / "scoring")
    theirs_s, theirs = by_transformers(model, rows, args.batch)
    lengths = [[len(choice) for choice in choices] for _, choices in rows]
    apart = np.abs(np.array(ours) - np.array(theirs)) / np.array(lengths)
    assert apart.max() < CLOSE, f"log-likelihoods differ by {apart.max()} per token"
    result = {
        "rows": len(rows),
        "choices": CHOICES,
        "context": args.context,
        "batchinfer_s": round(ours_s, 2),
        "transformers_s": round(theirs_s, 2),
        "ratio": round(theirs_s / ours_s, 2),
        "largest_difference_a_token": float(apart.max()),
        "prefix_hit_rate": round(summary["kv"]["prefix_hit_rate"], 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
