"""Measures other engines on W1, for at most 20 seconds each."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from gpu_models import random_model, shape_of
from gpu_operators import Pool, seconds
from gpu_results import Results
from gpu_workloads import gpu_workload, prompts

LIMIT_S = 20.0
_BATCHES = (64, 128, 256)


def generate(model_name: str, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Measure transformers' ``generate`` on rows sorted by output length, with the best of several
    batch sizes.

    Only the first batch of each size runs, with a time limit. The first batch has the longest
    outputs, and the smallest share of steps in which some rows have already finished.
    """
    model = random_model(model_name, device, _dtype(tiny), "sdpa")
    jobs = gpu_workload("W1", tiny=tiny)
    ids = prompts(jobs, model.config.vocab_size, 0)
    order = sorted(range(len(jobs)), key=lambda at: -jobs[at].output_len)
    rates = {}
    for size in (2,) if tiny else _BATCHES:
        batch = order[:size]
        longest = max(jobs[at].prompt_len for at in batch)
        input_ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for line, at in enumerate(batch):
            input_ids[line, longest - len(ids[at]) :] = torch.from_numpy(ids[at].astype(np.int64))
            mask[line, longest - len(ids[at]) :] = 1
        arguments = {"input_ids": input_ids.to(device), "attention_mask": mask.to(device)}
        options = {"do_sample": False, "pad_token_id": 0}
        model.generate(**arguments, **options, max_new_tokens=2)
        began = time.perf_counter()
        out = model.generate(
            **arguments,
            **options,
            max_new_tokens=max(jobs[at].output_len for at in batch),
            max_time=LIMIT_S / len(_BATCHES),
        )
        made = out.shape[1] - longest
        useful = sum(min(made, jobs[at].output_len) for at in batch)
        rates[size] = useful / (time.perf_counter() - began)
    return {"output_tokens_per_s": max(rates.values()), "by_batch": rates}


def generate_batch(model_name: str, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Measure transformers' continuous batching, with flash attention if it is installed."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    flash = next(
        (n for n, m in (("3", "flash_attn_interface"), ("2", "flash_attn")) if find_spec(m)), None
    )
    attention = (
        f"paged|flash_attention_{flash}" if flash and device.type == "cuda" else "paged|sdpa"
    )
    model = random_model(model_name, device, _dtype(tiny), attention)
    jobs = gpu_workload("W1", tiny=tiny)
    ids = prompts(jobs, model.config.vocab_size, 0)
    generation = GenerationConfig(
        max_new_tokens=1024, do_sample=False, eos_token_id=None, pad_token_id=3, bos_token_id=1
    )
    options = {"num_blocks": 64, "max_batch_tokens": 64} if tiny else {}
    lengths: dict[str, int] = {}
    with model.continuous_batching_context_manager(
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(**options),
        block=True,
    ) as manager:
        began = time.perf_counter()
        for job, row in zip(jobs, ids, strict=True):
            manager.add_request(
                input_ids=row.tolist(),
                max_new_tokens=job.output_len,
                eos_token_id=-1,
                streaming=True,
            )
        finished = 0
        while finished < len(jobs) and time.perf_counter() - began < LIMIT_S:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the batching thread ended")
                continue
            lengths[result.request_id] = len(result.generated_tokens)
            finished += result.is_finished()
        taken = time.perf_counter() - began
    rate = sum(lengths.values()) / taken
    return {"output_tokens_per_s": rate, "attention": attention, "rows_finished": finished}


def flashinfer(model_name: str, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Measure FlashInfer's decode attention on 256 contexts of about 1,000 tokens."""
    import flashinfer  # type: ignore[import-not-found]

    shape = shape_of(model_name)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(500, 1500, (256,), generator=generator).tolist()
    pool = Pool(device, lengths)
    blocks = [-(-length // 16) for length in lengths]
    indptr = torch.tensor([0, *np.cumsum(blocks).tolist()], dtype=torch.int32, device=device)
    indices = torch.cat([pool.tables[row, :count] for row, count in enumerate(blocks)])
    last = torch.tensor([(n - 1) % 16 + 1 for n in lengths], dtype=torch.int32, device=device)
    workspace = torch.empty(2**28, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    wrapper.plan(
        indptr, indices, last, shape.heads, shape.kv_heads, shape.width, 16,
        data_type=pool.dtype, q_data_type=pool.dtype,
    )  # fmt: skip
    query = torch.randn(256, shape.heads, shape.width, device=device, dtype=pool.dtype)
    taken = seconds(
        lambda: [wrapper.run(query, pool.layer(layer)) for layer in range(pool.layers)], device
    )
    return {"bytes_per_s": pool.bytes_per_layer * pool.layers / taken}


PEERS = {"generate": generate, "generate_batch": generate_batch, "flashinfer": flashinfer}


def peer(results: Results, device: torch.device, name: str, model: str, *, dry_run: bool) -> None:
    if name == "generate_batch" and device.type == "cpu" and find_spec("psutil") is None:
        results.add("peers", f"{model} {name}", {"note": "on a CPU transformers needs psutil"})
        return
    results.measure("peers", f"{model} {name}", lambda: PEERS[name](model, device, dry_run))


def _dtype(tiny: bool) -> torch.dtype:
    return torch.float32 if tiny else torch.bfloat16
