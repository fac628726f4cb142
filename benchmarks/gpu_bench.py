"""Compares the engine with transformers, and measures it on the workloads.

Measures tokens/s, the share of the roofline, and KV waste.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_models import Ready, random_model, ready, shape_of
from gpu_results import Results
from gpu_smoke import compare_graphs
from gpu_workloads import Job, gpu_workload, prompts
from roofline import Ceilings, sequential_seconds

from batchinfer.config import EngineConfig, SamplingParams
from batchinfer.engine.request import Request
from batchinfer.engine.stats import StepStats

_PROFILED_STEPS = (20, 60)  # first and last profiled step of W1
_W1_REPEATS = 3
_WARM_ROWS, _WARM_TOKENS = 64, 16
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Allowed relative errors of logits, caused by the order of sums in float32 and by rounding in
bfloat16.
"""


def bench(
    results: Results,
    device: torch.device,
    ceilings: Ceilings,
    model: str,
    workloads: list[str],
    ends: float,
    *,
    layer_major: bool,
    imports_s: float,
    dry_run: bool,
) -> None:
    """Measure workloads on one model, each after a warm-up with similar rows.

    If time remains, W1 is profiled and repeated. Each repetition replaces the cell of W1.

    Args:
        ends: value of `time.monotonic` at which this process must end.
        layer_major: store the blocks of a layer together, and add this to the names of cells.
        imports_s: seconds that this process took to import its modules.
    """
    name = f"{model} layer-major" if layer_major else model
    settings = EngineConfig(
        max_num_seqs=8 if dry_run else 1024,
        max_num_batched_tokens=64 if dry_run else 8192,
        num_kv_blocks=64 if dry_run else None,
    )
    dtype = torch.float32 if dry_run else torch.bfloat16
    built = ready(model, device, dtype, settings, layer_major=layer_major)
    results.add("bench", f"{name} start", {**built.facts, "imports s": imports_s})
    results.measure("bench", f"{name} graphs", partial(compare_graphs, built, dry_run=dry_run))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in workloads}

    def run(workload: str) -> dict[str, Any]:
        jobs = gpu_workload(workload, tiny=dry_run)
        if not runs[workload]:
            _run(built, warm_up(jobs), seed=100)
        runs[workload].append(_run(built, jobs, seed=len(runs[workload])))
        bound_s = sequential_seconds(
            shape_of(model), jobs, ceilings, max_num_seqs=settings.max_num_seqs
        )
        return _cell(runs[workload], bound_s)

    for workload in workloads:
        results.measure("bench", f"{name} {workload}", partial(run, workload))
    if "W1" not in workloads or dry_run:
        return
    if runs["W1"]:
        results.measure("bench", f"{name} W1 busy", lambda: {"share": _busy_share(built)})
    while runs["W1"] and len(runs["W1"]) < _W1_REPEATS:
        if ends - time.monotonic() < 1.5 * runs["W1"][-1]["seconds"]:
            break
        results.measure("bench", f"{name} W1", partial(run, "W1"))


def warm_up(jobs: list[Job]) -> list[Job]:
    """Return rows with short outputs that compile all kernels that the workload needs.

    If rows share prefixes, all rows are needed. In steps that are too large for a graph, the kernel
    that lists shared pieces is compiled separately for each power of two of the number of
    sequences.
    """
    rows = jobs if any(job.shared_len for job in jobs) else jobs[:_WARM_ROWS]
    return [replace(job, output_len=min(job.output_len, _WARM_TOKENS)) for job in rows]


def requests(jobs: list[Job], vocab: int, seed: int) -> list[Request]:
    """Return one request per job: greedy, or with temperature 1 if it has several samples."""
    return [
        Request(
            row_id=row,
            prompt_token_ids=ids,
            params=SamplingParams(
                max_tokens=job.output_len,
                n=job.samples,
                temperature=0.0 if job.samples == 1 else 1.0,
                ignore_eos=True,
            ),
            rng_key=(seed, row),
        )
        for row, (job, ids) in enumerate(zip(jobs, prompts(jobs, vocab, seed), strict=True))
    ]


def _run(built: Ready, jobs: list[Job], seed: int) -> dict[str, Any]:
    """Run all jobs and measure the time. Runs with different seeds have different prompts, so that
    no run finds prefixes that an earlier run has cached."""
    engine = built.engine
    todo = requests(jobs, built.vocab, seed)
    _synchronize()
    began = time.perf_counter()
    for request in todo:
        engine.add_request(request)
    stats: list[StepStats] = []
    completions = []
    while engine.num_unfinished:
        outcome = engine.step()
        completions += outcome.completions
        if outcome.stats is not None:
            stats.append(outcome.stats)
    _synchronize()
    seconds = time.perf_counter() - began
    assert all(completion.error_code is None for completion in completions)
    outputs = sum(len(out.token_ids) for done in completions for out in done.outputs)
    assert outputs == sum(job.samples * job.output_len for job in jobs)
    used = [(step.kv_waste, step.step_ms) for step in stats if step.kv_blocks_used]
    return {
        "seconds": seconds,
        "output_tokens": outputs,
        "output_tokens_per_s": outputs / seconds,
        "steps": len(stats),
        "waste": sum(waste * ms for waste, ms in used) / sum(ms for _, ms in used),
        "computed_prompt_tokens": sum(step.prefill_tokens for step in stats),
        "preemptions": sum(step.num_preempted for step in stats),
    }


def _cell(runs: list[dict[str, Any]], bound_s: float) -> dict[str, Any]:
    """Return the median run, compared with the bound."""
    ordered = sorted(runs, key=lambda run: run["seconds"])
    middle = ordered[len(ordered) // 2]
    return {
        **middle,
        "bound_tokens_per_s": middle["output_tokens"] / bound_s,
        "share_of_bound": bound_s / middle["seconds"],
        "all_seconds": [run["seconds"] for run in runs],
    }


def _busy_share(built: Ready) -> float:
    """Run some decode steps, and return the share of the time in which a CUDA kernel ran."""
    engine = built.engine
    for request in requests(gpu_workload("W1"), built.vocab, seed=99):
        engine.add_request(request)
    first, last = _PROFILED_STEPS
    for _ in range(first):
        engine.step()
    _synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        began = time.perf_counter()
        for _ in range(last - first):
            engine.step()
        _synchronize()
        wall = time.perf_counter() - began
    engine.abort_all()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, reached = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / 1e6 / wall


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parity(results: Results, device: torch.device, *, dry_run: bool) -> None:
    """Compare tokens in float32, and logits in both dtypes, with transformers."""
    jobs = [Job(length, 16, 8 if dry_run else 32) for length in (17, 40, 65, 129, 20)]
    jobs = jobs[:2] if dry_run else jobs
    results.measure("parity", "tokens", lambda: _tokens(device, jobs))
    for dtype in (torch.float32,) if dry_run else (torch.float32, torch.bfloat16):
        name = f"logits {str(dtype).removeprefix('torch.')}"
        results.measure("parity", name, lambda dtype=dtype: _logits(device, dtype))


def _tokens(device: torch.device, jobs: list[Job]) -> dict[str, Any]:
    """Compare greedy tokens of rows in one batch with transformers on each row alone."""
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
    return {**built.facts, "ok": same == len(jobs) and built.is_complete, "same": same}


def _logits(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Compare the logits after a prompt, computed in two chunks, with transformers' float32
    logits."""
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
