"""Benchmarks of attention kernels and linear layers, compared with the device's limits.

Measures the bandwidth of decodes, FLOP/s of prefills, the gain from shared prefixes, and linear
layers with float8 and 4-bit weights compared with cuBLAS in bfloat16.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_models import shape_of
from gpu_results import Results
from roofline import Ceilings, Shape
from torch import nn

from batchinfer.kernels import decode_plan
from batchinfer.kernels.attention_loop import Heads
from batchinfer.kernels.chunk_attention import ChunkWork, plan_chunks, query_tile
from batchinfer.kernels.decode_plan import DecodeWork, plan_decode
from batchinfer.kernels.paged_attention import paged_attention
from batchinfer.worker.linear.fp8_linear import fp8_kernel
from batchinfer.worker.linear.int4_linear import int4_kernel
from batchinfer.worker.linear.packed_linear import PackedLinear

_COPY_BYTES, _MATRIX = 4 * 2**30, 8192
_BLOCK, _WIDTH, _KV_HEADS = 16, 128, 8
_ROTATED_BYTES = 2**30  # total bytes of the layers that take turns, so that no cache holds them
_DECODES = ((64, 256), (64, 1024), (256, 300), (256, 1000), (1024, 1000), (16, 8000))
_PREFILLS = ((1, 8192), (8, 1024), (2, 4096))
# Rows, samples per row, tokens that all rows share, further prompt tokens of each row.
_TREES = ((128, 8, 2048, 512), (256, 1, 2048, 0), (16, 8, 1024, 0), (1, 64, 32768, 0))
_UNSHARED = 100  # tokens per sequence that no other sequence has
_PIECES = (256, 512)
_MOST_POOL_BYTES, _SHARE_OF_FREE = 100e9, 0.85
_STRIDED = (256, 800)  # sequences, tokens per sequence
_ROWS = (1, 64, 256, 4096)
_ROTATED_CODES = 2**28  # total codes of the weights that take turns, so that no cache holds them
_MOST_WEIGHTS = 32
_FP8_ERROR, _INT4_ERROR = 0.1, 0.2  # largest relative error of rounded weights


def seconds(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Capture ``run`` in a CUDA graph and return the median time of its replays; on a CPU, return
    the time of its second call."""
    if device.type == "cpu":
        run()
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure the bandwidth of copies and the FLOP/s of matrix products, on random data."""
    if device.type == "cpu":
        return Ceilings(_copy_rate(device, 2**22), _matrix_rate(device, dtype, 128), 8 * 2**30)
    memory_bytes = torch.cuda.get_device_properties(device).total_memory
    return Ceilings(
        _copy_rate(device, _COPY_BYTES), _matrix_rate(device, dtype, _MATRIX), memory_bytes
    )


def _copy_rate(device: torch.device, num_bytes: int) -> float:
    """Return bytes read plus bytes written per second."""
    source = torch.randint(0, 2**31 - 1, (num_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device)


def _matrix_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return FLOP/s of a square GEMM."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.mm(a, b, out=out), device)


def attention(
    results: Results,
    device: torch.device,
    ceilings: Ceilings,
    model: str,
    *,
    brief: bool,
    dry_run: bool,
) -> None:
    """Measure all cases with a model's number of heads and varying context lengths; if ``brief``,
    only decodes in a whole pool."""
    heads = max(shape_of(model).heads, _KV_HEADS)  # the model of a dry run has fewer heads
    measure = partial(_measure, results, model)
    strided = (2, 20) if dry_run else _STRIDED
    for layer_major in (False, True):
        name = f"decode in a whole pool, {'layer' if layer_major else 'block'}-major"
        measure(name, partial(_strided, device, ceilings, model, heads, *strided, layer_major))
    if brief:
        return
    for count, context in ((2, 40),) if dry_run else _DECODES:
        for piece in _PIECES[-1:] if dry_run else _PIECES:
            name = f"decode {count} x {context}, pieces of {piece}"
            measure(name, partial(_decode, device, ceilings, heads, count, context, piece))
    for count, length in ((1, 20),) if dry_run else _PREFILLS:
        name = f"prefill {count} x {length}"
        measure(name, partial(_prefill, device, ceilings, heads, count, length))
    for tree in ((1, 2, 512, 0),) if dry_run else _TREES:
        rows, samples, prefix, prompt = tree
        name = f"{rows} prompts of {prompt} after {prefix} shared tokens, {samples} samples"
        measure(name, partial(_shared, device, heads, *tree))


def _measure(results: Results, model: str, name: str, run: Callable[[], dict[str, Any]]) -> None:
    results.measure("attention", f"{model} {name}", run)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the next pool is of another size


class Pool:
    """Caches of several layers, and block tables with random slots.

    Args:
        layer_major: store the blocks of a layer together, instead of the layers of a block.
    """

    def __init__(
        self,
        device: torch.device,
        context_lens: list[int],
        *,
        layers: int = 0,
        num_slots: int = 0,
        layer_major: bool = False,
    ) -> None:
        blocks = [-(-length // _BLOCK) for length in context_lens]
        num_slots = num_slots or sum(blocks)
        self.bytes_per_layer = sum(context_lens) * 2 * _KV_HEADS * _WIDTH * 2
        rotated = 1 if device.type == "cpu" else _ROTATED_BYTES // self.bytes_per_layer
        self.layers = layers or max(1, min(16, rotated))
        self.dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
        self._layer_dim = 0 if layer_major else 1
        outer = (self.layers, num_slots) if layer_major else (num_slots, self.layers)
        shape = (*outer, 2, _KV_HEADS, _BLOCK, _WIDTH)
        self._pool = torch.empty(shape, device=device, dtype=self.dtype).normal_()
        slots = torch.randperm(num_slots, device=device, dtype=torch.int32)[: sum(blocks)]
        tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32, device=device)
        for row, part in enumerate(slots.split(blocks)):
            tables[row, : len(part)] = part
        self.tables = tables
        self.context_lens = torch.tensor(context_lens, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes

    def layer(self, layer: int) -> torch.Tensor:
        """Return keys and values of a layer, [slot, 2, kv_head, token, width]."""
        return self._pool.select(self._layer_dim, layer)

    def attend(
        self,
        query: torch.Tensor,
        query_starts: torch.Tensor,
        *,
        work: DecodeWork | None = None,
        chunks: ChunkWork | None = None,
    ) -> None:
        out = torch.empty_like(query)
        for layer in range(self.layers):
            keys, values = self.layer(layer).unbind(1)
            paged_attention(
                query,
                keys,
                values,
                self.tables,
                query_starts,
                self.context_lens,
                scale=_WIDTH**-0.5,
                out=out,
                work=work,
                launch=layer,
                chunks=chunks,
            )


def _strided(
    device: torch.device,
    ceilings: Ceilings,
    model: str,
    heads: int,
    count: int,
    context: int,
    layer_major: bool,
) -> dict[str, Any]:
    """Measure decodes of all layers, with random blocks of a pool that fills most of the memory.

    In a block-major pool like the engine's, a block stores all of its layers together. One layer's
    data in two adjacent blocks is therefore a whole block apart.
    """
    layers = shape_of(model).layers
    slot_bytes = layers * 2 * _KV_HEADS * _BLOCK * _WIDTH * 2
    if device.type == "cpu":
        num_slots = 4 * count * -(-context // _BLOCK)
    else:
        free = torch.cuda.mem_get_info(device)[0]
        num_slots = int(min(_MOST_POOL_BYTES, _SHARE_OF_FREE * free)) // slot_bytes
    pool = Pool(
        device, _spread(count, context), layers=layers, num_slots=num_slots, layer_major=layer_major
    )
    return {"pool_bytes": pool.nbytes, **_timed_decode(device, ceilings, pool, heads)}


def seconds_of_layers(
    run: Callable[[], object], planning: float, pool: Pool, device: torch.device
) -> float:
    """Return the time of one layer's attention, without the time to make the work list.

    Args:
        run: makes a work list, and attends in all layers of the pool. A list can be used only once,
            because the kernels count in the list how many items are taken.
        planning: seconds to make the list, which are subtracted. A model makes the list once for
            all its layers. This pool has fewer layers, so each layer's share of the planning time
            would be too large.
    """
    return (seconds(run, device) - planning) / pool.layers


def _spread(count: int, context: int) -> list[int]:
    """Return random lengths from 0.5 to 1.5 times ``context``."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randint(context // 2, 3 * context // 2, (count,), generator=generator)
    return [int(length) for length in spread]


def _decode(
    device: torch.device, ceilings: Ceilings, heads: int, count: int, context: int, piece: int
) -> dict[str, Any]:
    usual, decode_plan.DECODE_PIECE = decode_plan.DECODE_PIECE, piece
    try:
        return _timed_decode(device, ceilings, Pool(device, _spread(count, context)), heads)
    finally:
        decode_plan.DECODE_PIECE = usual


def _timed_decode(
    device: torch.device, ceilings: Ceilings, pool: Pool, heads: int
) -> dict[str, Any]:
    """Measure one decode step of all sequences, through all layers of the pool."""
    count = len(pool.context_lens)
    query = torch.randn(count, heads, _WIDTH, device=device, dtype=pool.dtype)
    starts = torch.arange(count + 1, dtype=torch.int32, device=device)

    def plan() -> DecodeWork:
        return plan_decode(
            starts,
            pool.context_lens,
            num_heads=heads,
            num_kv_heads=_KV_HEADS,
            value_width=_WIDTH,
            max_context_len=pool.tables.shape[1] * _BLOCK,
            num_launches=pool.layers,
        )

    planning = seconds(plan, device)
    taken = seconds_of_layers(
        lambda: pool.attend(query, starts, work=plan()), planning, pool, device
    )
    rate = pool.bytes_per_layer / taken
    return {
        "bytes": pool.bytes_per_layer,
        "seconds": taken,
        "seconds_of_plan": planning,
        "bytes_per_s": rate,
        "share_of_copy": rate / ceilings.bytes_per_s,
    }


def _shared(
    device: torch.device, heads: int, rows: int, samples: int, prefix: int, prompt: int
) -> dict[str, Any]:
    """Measure a decode step of rows with a common prefix twice: the attention kernel reads the
    prefix once for all rows, or again for each row."""
    count, context = rows * samples, prefix + prompt + _UNSHARED
    pool = Pool(device, [context] * count)
    for row in range(rows):
        of_row = slice(row * samples, (row + 1) * samples)
        pool.tables[of_row, : prefix // _BLOCK] = pool.tables[0, : prefix // _BLOCK]
        of_prompt = slice(prefix // _BLOCK, (prefix + prompt) // _BLOCK)
        pool.tables[of_row, of_prompt] = pool.tables[row * samples, of_prompt].clone()
    query = torch.randn(count, heads, _WIDTH, device=device, dtype=pool.dtype)
    starts = torch.arange(count + 1, dtype=torch.int32, device=device)
    lens = torch.full((count,), prefix + prompt, dtype=torch.int32, device=device)
    lens[::samples], lens[0] = prefix, 0
    tree = {"order": starts[:-1].clone(), "shared_lens": lens}

    def taken(**shares: torch.Tensor) -> float:
        plan = partial(
            plan_decode,
            starts,
            pool.context_lens,
            **shares,
            num_heads=heads,
            num_kv_heads=_KV_HEADS,
            value_width=_WIDTH,
            max_context_len=context,
            num_launches=pool.layers,
        )
        return seconds_of_layers(
            lambda: pool.attend(query, starts, work=plan()), seconds(plan, device), pool, device
        )

    return {"seconds": taken(**tree), "seconds_apart": taken()}


def _prefill(
    device: torch.device, ceilings: Ceilings, heads: int, num_sequences: int, length: int
) -> dict[str, Any]:
    pool = Pool(device, [length] * num_sequences)
    tokens = num_sequences * length
    query = torch.randn(tokens, heads, _WIDTH, device=device, dtype=pool.dtype)
    starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * length
    keys, values = pool.layer(0).unbind(1)
    tile = query_tile(Heads.of(query, keys, values))

    def plan() -> ChunkWork:
        return plan_chunks(starts, tokens=tile, num_tokens=tokens)

    planning = seconds(plan, device)
    taken = seconds_of_layers(
        lambda: pool.attend(query, starts, chunks=plan()), planning, pool, device
    )
    rate = 4 * heads * _WIDTH * num_sequences * length * (length + 1) / 2 / taken
    return {
        "seconds": taken,
        "seconds_of_plan": planning,
        "flop_per_s": rate,
        "share_of_product": rate / ceilings.flop_per_s,
    }


def linears(
    results: Results, device: torch.device, ceilings: Ceilings, model: str, *, dry_run: bool
) -> None:
    """Add one cell per linear layer and number of rows."""
    for name, (outputs, width) in weights_of(shape_of(model)).items():
        for rows in (3,) if dry_run else _ROWS:
            measure = partial(_linear_cell, device, ceilings, rows, outputs, width)
            results.measure("linears", f"{model} {name} [{outputs}, {width}] x {rows}", measure)


def weights_of(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of a decoder layer's merged linear layers."""
    queries = shape.heads * shape.width
    return {
        "qkv": (queries + 2 * shape.kv_heads * shape.width, shape.hidden),
        "o": (shape.hidden, queries),
        "gate_up": (2 * shape.inner, shape.hidden),
        "down": (shape.hidden, shape.inner),
    }


@torch.inference_mode()
def _linear_cell(
    device: torch.device, ceilings: Ceilings, rows: int, outputs: int, width: int
) -> dict[str, Any]:
    """Measure microseconds, TFLOP/s and share of copy bandwidth for bfloat16, float8 and 4 bits."""
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    num = 1 if device.type == "cpu" else min(_MOST_WEIGHTS, _ROTATED_CODES // (outputs * width))
    x = torch.randn(rows, width, device=device).to(dtype)
    plain = [_linear(outputs, width, device, dtype) for _ in range(max(2, num))]
    ways = {"bf16": plain} | {
        f"fp8, rows of {8 if rows_too else 16} bits": [
            PackedLinear(linear, fp8_kernel(rows_too=rows_too)) for linear in plain
        ]
        for rows_too in (True, False)
    }
    ways["int4"] = [PackedLinear(each, int4_kernel(batch_invariant=False)) for each in plain]
    cell: dict[str, Any] = {}
    for name, layers in ways.items():
        each = seconds(partial(_run_all, layers, x), device) / len(layers)
        cell |= {
            f"{name} us": each * 1e6,
            f"{name} TFLOP/s": 2e-12 * rows * outputs * width / each,
        }
        if name != "bf16":
            cell[f"{name} share of copy"] = layers[0].nbytes / each / ceilings.bytes_per_s
            cell[f"{name} error"] = _difference(layers[0](x), plain[0](x))
    cell["ok"] = all(
        cell[f"{name} error"] < (_INT4_ERROR if name == "int4" else _FP8_ERROR)
        for name in ways
        if name != "bf16"
    )
    return cell


def _linear(outputs: int, width: int, device: torch.device, dtype: torch.dtype) -> nn.Linear:
    linear = nn.Linear(width, outputs, bias=False, device=device, dtype=dtype)
    linear.weight.normal_(std=width**-0.5)
    return linear


def _run_all(layers: list[Any], x: torch.Tensor) -> None:
    for layer in layers:
        layer(x)


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative error. Rounding weights and rows to float8 causes an error of 0.03 to
    0.04."""
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())
