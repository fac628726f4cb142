"""This project's engine on the fixed workloads: tokens/s, share of the roofline, what is wasted."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from gpu_models import SHAPES, Ready, ready, shape_of
from gpu_workloads import Job, gpu_workload, prompts
from roofline import Ceilings, sequential_seconds

from batchinfer.config import EngineConfig, SamplingParams
from batchinfer.engine.engine import Engine
from batchinfer.engine.request import Request
from batchinfer.engine.stats import StepStats

WORKLOADS = ("W1", "W2", "W3")
_PROFILED_STEPS = (20, 60)  # of W1: from, to
_W1_REPEATS = 3


def bench(device: torch.device, ceilings: Ceilings, *, dry_run: bool) -> list[dict[str, Any]]:
    """Every workload on every shape; W1 is repeated."""
    dtype = torch.float32 if dry_run else torch.bfloat16
    settings = EngineConfig(
        max_num_seqs=8 if dry_run else 1024,
        max_num_batched_tokens=64 if dry_run else 8192,
        num_kv_blocks=64 if dry_run else None,
    )
    cells = []
    for name in ("tiny",) if dry_run else SHAPES:
        engine = ready(name, device, dtype, settings)
        _run(engine.engine, gpu_workload("W1", tiny=dry_run)[:8], engine.vocab, seed=100)  # warm up
        for workload in WORKLOADS:
            jobs = gpu_workload(workload, tiny=dry_run)
            bound_s = sequential_seconds(
                shape_of(name), jobs, ceilings, max_num_seqs=settings.max_num_seqs
            )
            repeats = _W1_REPEATS if workload == "W1" and not dry_run else 1
            runs = [_run(engine.engine, jobs, engine.vocab, seed) for seed in range(repeats)]
            cell = _median(runs)
            cells.append(
                {
                    "model": name,
                    "workload": workload,
                    **cell,
                    "bound_tokens_per_s": cell["output_tokens"] / bound_s,
                    "share_of_bound": bound_s / cell["seconds"],
                    "busy_share": _busy_share(engine) if workload == "W1" else None,
                    "graphs_captured": engine.graphs.num_captured if engine.graphs else 0,
                    "fused": engine.fused,
                    "num_blocks": engine.num_blocks,
                }
            )
            print(_line(cells[-1]), flush=True)
        del engine
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return cells


def requests(jobs: list[Job], vocab: int, seed: int) -> list[Request]:
    """One for each job: greedy, or drawn where a row has several samples."""
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


def _run(engine: Engine, jobs: list[Job], vocab: int, seed: int) -> dict[str, Any]:
    """All jobs against the clock. Each seed has prompts of its own: no run finds another's."""
    todo = requests(jobs, vocab, seed)
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


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    runs = sorted(runs, key=lambda run: run["seconds"])
    middle = runs[len(runs) // 2]
    return middle | {"all_seconds": [run["seconds"] for run in runs]}


def _busy_share(built: Ready) -> float | None:
    """Share of the time in which a kernel ran, over some steps of decoding; None on a CPU."""
    if not torch.cuda.is_available():
        return None
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


def _line(cell: dict[str, Any]) -> str:
    busy = "-" if cell["busy_share"] is None else f"{cell['busy_share']:.2f}"
    return (
        f"{cell['model']:<13} {cell['workload']}  {cell['output_tokens_per_s']:>9,.0f} tok/s  "
        f"share of bound {cell['share_of_bound']:.2f}  busy {busy}  waste {cell['waste']:.3f}  "
        f"preemptions {cell['preemptions']}"
    )
