"""This project's engine against transformers' own generation and logits, on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gpu_bench import requests
from gpu_models import random_model, ready
from gpu_results import Results
from gpu_workloads import Job, prompts

from batchinfer.config import EngineConfig

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Of the logits' norm: in float32 for another order of sums, in bfloat16 for its rounding."""


def parity(results: Results, device: torch.device, *, dry_run: bool) -> None:
    """Tokens in float32, then logits of both dtypes against float32's."""
    jobs = [Job(length, 16, 8 if dry_run else 32) for length in (17, 40, 65, 129, 20)]
    jobs = jobs[:2] if dry_run else jobs
    results.measure("parity", "tokens", lambda: _tokens(device, jobs))
    for dtype in (torch.float32,) if dry_run else (torch.float32, torch.bfloat16):
        name = f"logits {str(dtype).removeprefix('torch.')}"
        results.measure("parity", name, lambda dtype=dtype: _logits(device, dtype))


def _tokens(device: torch.device, jobs: list[Job]) -> dict[str, Any]:
    """Greedy tokens of rows run together against each row alone."""
    settings = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, num_kv_blocks=128)
    built = ready("tiny", device, torch.float32, settings)
    for request in requests(jobs, built.vocab, seed=0):
        built.engine.add_request(request)
    got: dict[int, list[int]] = {}
    while built.engine.num_unfinished:
        for done in built.engine.step().completions:
            got[done.request.row_id] = done.outputs[0].token_ids.tolist()
    model = random_model("tiny", device, torch.float32, "eager")
    same = 0
    for row, (job, ids) in enumerate(zip(jobs, prompts(jobs, built.vocab, 0), strict=True)):
        input_ids = torch.from_numpy(ids.astype(np.int64))[None].to(device)
        out = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=job.output_len,
            do_sample=False,
            pad_token_id=0,
        )
        same += out[0, len(ids) :].tolist() == got[row]
    captured = built.graphs.num_captured if built.graphs else 0
    return {
        "ok": same == len(jobs),
        "rows": len(jobs),
        "same": same,
        "graphs_captured": captured,
    }


def _logits(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Logits after a prompt that is computed in two chunks, against float32's."""
    jobs = [Job(48, 0, 1)]
    settings = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, num_kv_blocks=32)
    built = ready("tiny", device, dtype, settings)
    got: list[torch.Tensor] = []
    sample = built.engine._runner._sample

    def watch(logits: torch.Tensor, batch: Any) -> Any:
        got.append(logits.clone())
        return sample(logits, batch)

    built.engine._runner._sample = watch
    for request in requests(jobs, built.vocab, seed=1):
        built.engine.add_request(request)
    while built.engine.num_unfinished:
        built.engine.step()
    reference = random_model("tiny", device, dtype, "eager").float()
    ids = torch.from_numpy(prompts(jobs, built.vocab, 1)[0].astype(np.int64))[None].to(device)
    with torch.inference_mode():
        expected = reference(input_ids=ids, use_cache=False).logits[0, -1]
    difference = (got[0][-1].float() - expected).norm() / expected.norm()
    return {"ok": bool(difference <= _TOLERANCE[dtype]), "relative_error": float(difference)}
