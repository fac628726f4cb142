"""Checks in a minute whether CUDA results are right: kernels, fusion and CUDA graphs.

Compares kernels with their references in torch, and replayed CUDA graphs with eager steps. Memory
that must not be read holds NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_models import Ready, ready
from gpu_results import Results

from batchinfer.config import EngineConfig
from batchinfer.engine.step import SharedPrefixes, Step
from batchinfer.kernels import reference, rms_norm, rotary_write, sample, sampling_reference
from batchinfer.kernels import silu_mul as silu
from batchinfer.kernels.fp8 import FP8
from batchinfer.worker.attention.attention import make_cuda_backend
from batchinfer.worker.forward import forward
from tests.kernels.cases import TOLERANCE, AttentionCase, build_attention, check_attention
from tests.kernels.row_cases import (
    RotaryCase,
    RowCase,
    build_rms_norm,
    build_rotary_write,
    build_silu_mul,
)
from tests.kernels.sample_cases import KINDS, Rows, build_sample
from tests.kernels.shared_cases import SharedCase, build_shared
from tests.worker.step_maker import HandSequence, StepMaker

_LENS = ((1, 1), (1, 700), (64, 900), (1, 257), (300, 1111), (7, 40), (1, 1500), (1, 513))
_FEW_LENS = ((1, 1), (5, 30), (1, 70))
_SHARED = 512  # tokens; equal to a piece of a context on a GPU
_FEW_SHARED = 64
_REPLAY_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Allowed differences between a graph and the eager step, relative to the largest value. A graph's
GEMMs have more rows than the eager step's GEMMs, and may therefore add up products in a different
order."""
_MOST_LAYERS = 2
_DEEP = 2.5
"""Factor by which ``_REPLAY_TOLERANCE`` is larger for models with more layers."""
_MOST_CLONED_BYTES = 2e9


@dataclass(frozen=True)
class _Steps:
    """A kind of step: numbers of sequences that decode and that compute a chunk of a prompt."""

    decodes: int
    chunks: int = 0
    chunk: int = 0
    context: int = 300
    """Mean number of tokens before the step."""
    shared: int = 0
    """Tokens that all sequences share."""


_STEPS = {
    "decode of 256 sequences": _Steps(256),
    "decode of 64 sequences with a shared prefix": _Steps(64, shared=_SHARED),
    "512 tokens in 64 sequences": _Steps(56, chunks=8, chunk=57),
}
_FEW_STEPS_OF_A_LARGE_POOL = {
    "decode of 16 sequences": _Steps(16),
    "decode of 16 sequences with a shared prefix": _Steps(16, shared=_SHARED),
    "64 tokens in 16 sequences": _Steps(14, chunks=2, chunk=25),
}
_FEW_STEPS = {
    "decode of 5 sequences": _Steps(5, context=20),
    "decode of 3 sequences with a shared prefix": _Steps(3, context=20, shared=_FEW_SHARED),
    "15 tokens in 5 sequences": _Steps(3, chunks=2, chunk=6, context=20),
}


def smoke(results: Results, device: torch.device, *, dry_run: bool) -> None:
    """Add one cell per comparison. A cell is ok if all values agree."""
    for name, check in _kernels(device, dry_run).items():
        results.measure("smoke", name, partial(_passes, check))
    built: list[Ready] = []
    results.measure("smoke", "fusion and CUDA graphs", lambda: _start(built, device, dry_run))
    for name, steps in (_FEW_STEPS if dry_run else _STEPS).items():
        if built:
            results.measure("smoke", name, partial(_compare, built[0], steps))


def _passes(check: Callable[[], None]) -> dict[str, Any]:
    check()
    return {"ok": True}


def _kernels(device: torch.device, few: bool) -> dict[str, Callable[[], None]]:
    """Return a check for each kernel, with 2 and with 4 query heads per KV head."""
    dtype = torch.float32 if few else torch.bfloat16  # the interpreter computes bfloat16 wrongly
    kv_heads, width = (1, 16) if few else (8, 128)
    lens, shared = (_FEW_LENS, _FEW_SHARED) if few else (_LENS, _SHARED)
    checks: dict[str, Callable[[], None]] = {
        "norms, rotary embedding, activations": partial(_check_rows, width, device, dtype)
    }
    for group in (2, 4):
        case = AttentionCase("smoke", lens, group * kv_heads, kv_heads, width)
        sharing = SharedCase(
            replace(case, lens=tuple((1, shared + 1 + 7 * i) for i in range(5))),
            tuple(range(5)),
            (0, *[shared] * 4),
        )
        for suffix, pool in (("", None), (", float8 pool", FP8)):
            name = f"{group} query heads per KV head{suffix}"
            checks[f"attention, {name}"] = partial(_check_attention, case, device, dtype, pool)
            checks[f"shared prefix, {name}"] = partial(_check_shared, sharing, device, dtype, pool)
    rows = Rows(500) if few else Rows(151_936)
    checks["sampling"] = partial(_check_sampling, rows, device, torch.float16 if few else dtype)
    return checks


def _check_attention(case: AttentionCase, *of: Any) -> None:
    check_attention(build_attention(case, *of))


def _check_shared(case: SharedCase, *of: Any) -> None:
    check_attention(build_shared(case, *of))


def _check_rows(width: int, device: torch.device, dtype: torch.dtype) -> None:
    rows, rotary = RowCase("smoke", 33, 8 * width), RotaryCase("smoke", 33, 4, 2, width, norms=True)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype], "equal_nan": True}
    for build, kernel, twin in (
        (build_rms_norm, rms_norm.rms_norm, reference.rms_norm),
        (build_silu_mul, silu.silu_mul, reference.silu_mul),
    ):
        got, expected = (build(rows, device, dtype) for _ in range(2))
        kernel(**got)
        twin(**expected)
        torch.testing.assert_close(got["out"], expected["out"], **tolerance)
    (pool, got), (expected_pool, expected) = (
        build_rotary_write(rotary, device, dtype) for _ in range(2)
    )
    rotary_write.rotary_write(**got)
    reference.rotary_write(**expected)
    torch.testing.assert_close(got["qkv"], expected["qkv"], **tolerance)
    torch.testing.assert_close(pool, expected_pool, **tolerance)


def _check_sampling(rows: Rows, device: torch.device, dtype: torch.dtype) -> None:
    """Compare tokens with the reference's tokens, which are drawn on the CPU."""
    logits, kinds = rows.logits(len(KINDS), dtype), list(KINDS.values())
    got = build_sample(logits.to(device), kinds, str(device))
    expected = build_sample(logits, kinds)
    sample.sample(**got)
    sampling_reference.sample(**expected)
    assert got["token_ids"].tolist() == expected["token_ids"].tolist(), "other tokens are drawn"


def _start(built: list[Ready], device: torch.device, few: bool) -> dict[str, Any]:
    """Make an engine, append it to ``built``, and check that it is fused and captured."""
    settings = EngineConfig(
        max_num_seqs=8 if few else 256,
        max_num_batched_tokens=32 if few else 1024,
        num_kv_blocks=64 if few else 8192,
    )
    name, dtype = ("tiny", torch.float32) if few else ("two layers of Qwen3-0.6B", torch.bfloat16)
    built.append(ready(name, device, dtype, settings))
    return built[0].facts


@torch.inference_mode()
def _compare(built: Ready, steps: _Steps) -> dict[str, Any]:
    """Compare the logits, and the pool's contents afterwards, of a graph and of the eager step."""
    expected, got = _run_both(built, _make_step(built, steps))
    tolerance = _REPLAY_TOLERANCE[expected[0].dtype]
    tolerance *= 1 if built.layers <= _MOST_LAYERS else _DEEP
    errors = {
        f"relative error of {name}": _difference(*tensors)
        for name, *tensors in zip(("logits", "pool"), got, expected, strict=True)
    }
    finite = bool(expected[0].isfinite().all())
    ok = finite and all(error <= tolerance for error in errors.values())
    return {"ok": ok, "finite": finite, **errors}


def compare_graphs(built: Ready, *, dry_run: bool) -> dict[str, Any]:
    """Compare some graphs of a model with eager steps, and clear the pool. Return a cell that is ok
    if all steps agree, with the errors of the other steps."""
    few = _FEW_STEPS if dry_run else _FEW_STEPS_OF_A_LARGE_POOL
    try:
        compared = {name: _compare(built, steps) for name, steps in few.items()}
    finally:
        built.cache.pool.zero_()
    wrong = {name: str(values) for name, values in compared.items() if not values["ok"]}
    return {"ok": not wrong, "steps": len(compared), **wrong}


_Result = tuple[torch.Tensor, torch.Tensor]
"""The logits of a step, and the slots of the pool after it."""


def _run_both(built: Ready, step: Step) -> tuple[_Result, _Result]:
    """Run a step eagerly, then its graph on the same pool. If the pool is large, return only the
    slots that the step uses."""
    cache, backend = built.cache, make_cuda_backend(built.cache, None)
    slots = torch.arange(cache.num_blocks + 1)
    if cache.nbytes > _MOST_CLONED_BYTES:
        slots = torch.from_numpy(step.block_tables.astype(np.int64)).unique()
    slots = slots.to(cache.pool.device)
    before = cache.blocks[slots]
    expected = forward(built.model, cache, backend, step).clone()
    computed = cache.blocks[slots]
    cache.blocks[slots] = before
    size = built.graphs.size_for(step)
    if size is None:
        raise ValueError("no graph was captured for this step")
    return (expected, computed), (built.graphs.logits(step, size), cache.blocks[slots])


def _make_step(built: Ready, steps: _Steps) -> Step:
    """Fill the pool with NaN, except for keys and values of new sequences. Return the step of these
    sequences."""
    cache, rng = built.cache, np.random.default_rng(0)
    size = cache.layout.block_size
    cache.pool[:] = torch.nan
    cache.blocks[cache.null_slot].zero_()
    maker = StepMaker(cache.num_blocks, size)
    new = [1] * steps.decodes + [steps.chunk] * steps.chunks
    there = steps.shared + rng.integers(1, 2 * steps.context, len(new))
    lengths = there + new
    ids = [rng.integers(0, built.vocab, length).tolist() for length in lengths]
    leader = maker.sequence(ids[0])
    filled = [(leader, int(there[0]))]
    slots = [maker.step(filled).slot_mapping]
    followers = [
        HandSequence(own, leader.block_table[: steps.shared // size], steps.shared)
        for own in ids[1:]
    ]
    filled = [(s, int(n) - steps.shared) for s, n in zip(followers, there[1:], strict=True)]
    slots.append(maker.step(filled).slot_mapping)
    _fill(built, np.concatenate(slots))
    step = maker.step(list(zip([leader, *followers], new, strict=True)))
    if not steps.shared:
        return step
    order = np.arange(step.num_sequences, dtype=np.int32)
    shared_lens = np.where(order == 0, 0, steps.shared).astype(np.int32)
    return replace(step, shared_prefixes=SharedPrefixes(order, shared_lens))


def _fill(built: Ready, slots: np.ndarray) -> None:
    """Write random keys and values to slots of tokens in all layers."""
    cache, device = built.cache, built.cache.pool.device
    generator = torch.Generator(device).manual_seed(0)
    mapping = torch.from_numpy(slots).to(device)
    for layer in range(built.layers):
        caches = cache.key(layer), cache.value(layer)
        sizes = [(len(slots), part.shape[1], part.shape[3]) for part in caches]
        random = (
            torch.randn(size, generator=generator, device=device).to(cache.pool.dtype)
            for size in sizes
        )
        reference.kv_write(*random, *caches, mapping)


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value; NaN if only one of the tensors
    is NaN at some position."""
    both = got.isnan() & expected.isnan()
    largest = (got - expected).masked_fill_(both, 0).abs().max()
    return float(largest / expected.nan_to_num(0.0).abs().max())
