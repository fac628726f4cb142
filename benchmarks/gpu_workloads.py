"""Workloads of the GPU benchmark: token ids with fixed output lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

FIRST_ID = 300  # lowest id of an ordinary token


@dataclass(frozen=True)
class Job:
    """Numbers of a row's prompt tokens, shared prompt tokens, output tokens and samples."""

    prompt_len: int
    shared_len: int
    output_len: int
    samples: int = 1


def gpu_workload(name: str, *, tiny: bool = False) -> list[Job]:
    """Return W1 (nano-vllm's lengths), W2 (long prompts) or W3 (a shared prefix and 8 samples).

    ``tiny`` shrinks the workload, so that a CPU runs it in seconds.
    """
    if name == "W1":
        return _mixed(4, 4, 16) if tiny else _mixed(256, 100, 1024)
    if name == "W2":
        return [Job(24, 0, 4)] * 4 if tiny else [Job(1024, 0, 128)] * 1000
    if name == "W3":
        return [Job(40, 32, 4, 2)] * 2 if tiny else [Job(2048 + 128, 2048, 128, 8)] * 128
    raise ValueError(f"unknown workload {name!r}; choose W1, W2 or W3")


def _mixed(count: int, low: int, high: int) -> list[Job]:
    """Return rows with the uniform random lengths that nano-vllm's bench.py draws."""
    draw = random.Random(0)
    prompt_lens = []
    for _ in range(count):
        prompt_lens.append(draw.randint(low, high))
        for _ in range(prompt_lens[-1]):
            draw.randint(0, 10000)
    return [Job(length, 0, draw.randint(low, high)) for length in prompt_lens]


def prompts(jobs: list[Job], vocab: int, seed: int) -> list[np.ndarray]:
    """Return each job's prompt: the prefix that the jobs share, then random int32 token ids."""
    rng = np.random.default_rng(seed)
    low = min(FIRST_ID, vocab // 2)
    shared = rng.integers(low, vocab, max(job.shared_len for job in jobs), dtype=np.int32)
    own = [rng.integers(low, vocab, job.prompt_len, dtype=np.int32) for job in jobs]
    for job, ids in zip(jobs, own, strict=True):
        ids[: job.shared_len] = shared[: job.shared_len]
    return own
