"""The attention kernels alone: bandwidth of decodes, FLOP/s of prefills, and what sharing saves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_models import shape_of
from gpu_results import Results
from gpu_timing import seconds
from roofline import Ceilings

from batchinfer.kernels import decode_work
from batchinfer.kernels.decode_work import plan_decode
from batchinfer.kernels.paged_attention import paged_attention

_BLOCK, _WIDTH, _KV_HEADS = 16, 128, 8
_ROTATED_BYTES = 2**30  # layers in turn, so that none is found in a cache
_DECODES = ((64, 256), (64, 1024), (256, 300), (256, 1000), (1024, 1000), (16, 8000))
_PREFILLS = ((1, 8192), (8, 1024), (2, 4096))
# Rows, samples of each, tokens that all rows share, tokens of a row's own prompt.
_TREES = ((128, 8, 2048, 512), (256, 1, 2048, 0), (16, 8, 1024, 0), (1, 64, 32768, 0))
_OWN = 100  # tokens of a sequence that no other has
_PIECES = (256, 512)
_MOST_POOL_BYTES, _SHARE_OF_FREE = 100e9, 0.85
_STRIDED = (256, 800)  # sequences, tokens of each


def attention(
    results: Results, device: torch.device, ceilings: Ceilings, model: str, *, dry_run: bool
) -> None:
    """Each case with the heads of a model; contexts are not equal."""
    heads = max(shape_of(model).heads, _KV_HEADS)  # a dry run's model has fewer
    measure = partial(_measure, results, model)
    strided = (2, 20) if dry_run else _STRIDED
    for layer_major in (False, True):
        name = f"decode in a whole pool, {'layer' if layer_major else 'block'}-major"
        measure(name, partial(_strided, device, ceilings, model, heads, *strided, layer_major))
    for count, context in ((2, 40),) if dry_run else _DECODES:
        for piece in _PIECES[-1:] if dry_run else _PIECES:
            name = f"decode {count} x {context}, pieces of {piece}"
            measure(name, partial(_decode, device, ceilings, heads, count, context, piece))
    for count, length in ((1, 20),) if dry_run else _PREFILLS:
        name = f"prefill {count} x {length}"
        measure(name, partial(_prefill, device, ceilings, heads, count, length))
    for tree in ((1, 2, 512, 0),) if dry_run else _TREES:
        rows, samples, prefix, prompt = tree
        name = f"shared {rows} x {samples} below {prefix} + {prompt}"
        measure(name, partial(_shared, device, heads, *tree))


def _measure(results: Results, model: str, name: str, run: Callable[[], dict[str, Any]]) -> None:
    results.measure("attention", f"{model} {name}", run)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the next pool is of another size


class Pool:
    """Several layers' caches, and tables of blocks that lie scattered over all slots.

    Args:
        layers: by default so many that one reads what no cache holds.
        num_slots: by default no more than the contexts take.
        layer_major: a layer's blocks lie together; else a block's layers do.
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
        """Keys and values of a layer, [slot, 2, kv_head, token, width]."""
        return self._pool.select(self._layer_dim, layer)

    def attend(self, query: torch.Tensor, query_starts: torch.Tensor, **options: Any) -> None:
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
                max_context_len=self.tables.shape[1] * _BLOCK,
                launch=layer if options.get("work") is not None else 0,
                **options,
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
    """Decodes of all of a model's layers, blocks scattered over as much memory as a pool has.

    Block-major, as the engine's pool is, one layer's keys and values of a block lie as far from
    the next block's as all layers of a block take.
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


def _spread(count: int, context: int) -> list[int]:
    """Lengths of half to one and a half times ``context``."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randint(context // 2, 3 * context // 2, (count,), generator=generator)
    return [int(length) for length in spread]


def _decode(
    device: torch.device, ceilings: Ceilings, heads: int, count: int, context: int, piece: int
) -> dict[str, Any]:
    usual, decode_work.DECODE_PIECE = decode_work.DECODE_PIECE, piece
    try:
        return _timed_decode(device, ceilings, Pool(device, _spread(count, context)), heads)
    finally:
        decode_work.DECODE_PIECE = usual


def _timed_decode(
    device: torch.device, ceilings: Ceilings, pool: Pool, heads: int
) -> dict[str, Any]:
    """One token of every sequence, through all of the pool's layers."""
    count = len(pool.context_lens)
    query = torch.randn(count, heads, _WIDTH, device=device, dtype=pool.dtype)
    starts = torch.arange(count + 1, dtype=torch.int32, device=device)

    def run() -> None:
        work = plan_decode(
            starts,
            pool.context_lens,
            num_heads=heads,
            num_kv_heads=_KV_HEADS,
            value_width=_WIDTH,
            max_context_len=pool.tables.shape[1] * _BLOCK,
            num_launches=pool.layers,
        )
        pool.attend(query, starts, max_query_len=1, work=work)

    taken = seconds(run, device) / pool.layers
    rate = pool.bytes_per_layer / taken
    return {
        "bytes": pool.bytes_per_layer,
        "seconds": taken,
        "bytes_per_s": rate,
        "share_of_copy": rate / ceilings.bytes_per_s,
    }


def _shared(
    device: torch.device, heads: int, rows: int, samples: int, prefix: int, prompt: int
) -> dict[str, Any]:
    """Samples of rows below one prefix: the same step with the tree told, and without."""
    count, context = rows * samples, prefix + prompt + _OWN
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

    def run(**shares: torch.Tensor) -> None:
        work = plan_decode(
            starts,
            pool.context_lens,
            **shares,
            num_heads=heads,
            num_kv_heads=_KV_HEADS,
            value_width=_WIDTH,
            max_context_len=context,
            num_launches=pool.layers,
        )
        pool.attend(query, starts, max_query_len=1, work=work)

    told = seconds(lambda: run(**tree), device) / pool.layers
    apart = seconds(run, device) / pool.layers
    return {"seconds": told, "seconds_apart": apart}


def _prefill(
    device: torch.device, ceilings: Ceilings, heads: int, num_sequences: int, length: int
) -> dict[str, Any]:
    pool = Pool(device, [length] * num_sequences)
    tokens = num_sequences * length
    query = torch.randn(tokens, heads, _WIDTH, device=device, dtype=pool.dtype)
    starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * length
    taken = seconds(
        lambda: pool.attend(query, starts, max_query_len=length, min_query_len=length), device
    )
    flops = 4 * heads * _WIDTH * num_sequences * length * (length + 1) / 2
    rate = flops * pool.layers / taken
    return {
        "seconds": taken / pool.layers,
        "flop_per_s": rate,
        "share_of_product": rate / ceilings.flop_per_s,
    }
