"""Runs one engine over one workload in this process and prints one JSON line.

python benchmarks/engines.py batchinfer MODEL --workload W1 --scale 0.25 --dtype float32
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

from workloads import Row, workload

Run = Callable[[list[Row]], list[list[int]]]
"""Rows to the numbers of tokens that came out, by row and sample."""


def batchinfer(args: argparse.Namespace) -> Run:
    """This project's engine, through its Python API."""
    from batchinfer import LLM, SamplingParams

    llm = LLM(args.model, dtype=args.dtype, block_size=args.block_size)

    def run(rows: list[Row]) -> list[list[int]]:
        params = [
            SamplingParams(
                max_tokens=row.output_len,
                n=row.n,
                temperature=0.0 if row.n == 1 else 1.0,
                ignore_eos=True,
            )
            for row in rows
        ]
        outputs = llm.generate([row.prompt for row in rows], params, use_tqdm=False)
        return [[len(sample.token_ids) for sample in output.outputs] for output in outputs]

    return run


def generate(args: argparse.Namespace) -> Run:
    """transformers' ``generate``: left-padded batches of rows sorted by their output length."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))

    def run(rows: list[Row]) -> list[list[int]]:
        order = sorted(
            range(len(rows)), key=lambda at: (-rows[at].output_len, -len(rows[at].prompt))
        )
        per_batch = max(1, args.batch // rows[0].n)
        lengths: dict[int, list[int]] = {}
        for start in range(0, len(order), per_batch):
            batch = order[start : start + per_batch]
            longest = max(len(rows[at].prompt) for at in batch)
            ids = torch.zeros((len(batch), longest), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for line, at in enumerate(batch):
                ids[line, longest - len(rows[at].prompt) :] = torch.tensor(rows[at].prompt)
                mask[line, longest - len(rows[at].prompt) :] = 1
            n = rows[batch[0]].n
            sampling = {"do_sample": True, "num_return_sequences": n} if n > 1 else {}
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(rows[at].output_len for at in batch),
                pad_token_id=0,
                **({"do_sample": False} | sampling),
            )
            # Tokens past a row's own length are not counted.
            lengths |= {at: [rows[at].output_len] * n for at in batch}
        return [lengths[at] for at in range(len(rows))]

    return run


ENGINES: dict[str, Callable[[argparse.Namespace], Run]] = {
    "batchinfer": batchinfer,
    "generate": generate,
}


def measure(run: Run, rows: list[Row]) -> dict[str, Any]:
    """Run a little of everything once, then all rows against the clock."""
    run([Row(row.prompt, 4, row.n) for row in rows[:2]])
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    lengths = run(rows)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert lengths == [[row.output_len] * row.n for row in rows], "an engine cut an output short"
    output_tokens = sum(map(sum, lengths))
    return {
        "seconds": seconds,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / seconds,
        "peak_rss_mib": after.ru_maxrss / 1024,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--workload", default="W1")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=32, help="sequences in a batch of generate")
    parser.add_argument("--block-size", type=int, default=16)
    arguments = parser.parse_args()
    rows = workload(arguments.workload, arguments.scale)
    result = measure(ENGINES[arguments.engine](arguments), rows)
    print(json.dumps({**vars(arguments), **result}))
