"""Measures the accuracy of quantized weights: perplexity and correct answers on the quickstart.

python benchmarks/perplexity.py --rows 256 --quantizations none int8 int4
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import polars as pl
from transformers import AutoTokenizer

from batchinfer import LLM, SamplingParams

QUICKSTART = Path(__file__).resolve().parent.parent / "jobs" / "quickstart"


def load_rows(count: int) -> list[dict[str, Any]]:
    """Return rows of the quickstart with the token ids of contexts, and of answers plus the end
    token."""
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    rows = pl.read_parquet(QUICKSTART / "prompts.parquet").head(count).to_dicts()
    for row in rows:
        messages = [
            {"role": "system", "content": row["instruction"]},
            {"role": "user", "content": row["document"]},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        row["context"] = tokenizer.encode(text, add_special_tokens=False)
        row["ids"] = tokenizer.encode(row["answer"], add_special_tokens=False)
        row["ids"].append(tokenizer.eos_token_id)
    return rows


def measure(quantization: str | None, dtype: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return perplexities over the tokens of all rows, and the share of correct answers."""
    llm = LLM(str(QUICKSTART / "model"), dtype=dtype, quantization=quantization)
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    wholes = [row["context"] + row["ids"] for row in rows]
    text, answer = [], []
    for row, output in zip(rows, llm.generate(wholes, scored, use_tqdm=False), strict=True):
        logprobs = output.prompt_logprobs[1:]
        ids = output.prompt_token_ids[1:]
        losses = [-by_id[token].logprob for by_id, token in zip(logprobs, ids, strict=True)]
        text += losses[: -len(row["ids"])]
        answer += losses[-len(row["ids"]) :]
    greedy = SamplingParams(max_tokens=64, temperature=0.0)
    outputs = llm.generate([row["context"] for row in rows], greedy, use_tqdm=False)
    right = [
        output.outputs[0].text.strip() == row["answer"]
        for row, output in zip(rows, outputs, strict=True)
    ]
    return {
        "quantization": quantization,
        "dtype": dtype,
        "text_perplexity": math.exp(sum(text) / len(text)),
        "answer_perplexity": math.exp(sum(answer) / len(answer)),
        "right": sum(right) / len(right),
        "rows": len(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--quantizations", nargs="+", default=["none", "int8", "int4"])
    args = parser.parse_args()
    rows = load_rows(args.rows)
    for name in args.quantizations:
        result = measure(None if name == "none" else name, args.dtype, rows)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
