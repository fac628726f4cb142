"""The attention kernels alone: bandwidth of decodes, FLOP/s of prefills, and what sharing saves."""

from __future__ import annotations

from typing import Any

import torch
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


def attention(device: torch.device, ceilings: Ceilings, *, dry_run: bool) -> list[dict[str, Any]]:
    """Each case with the heads of a 0.6B (16) and of an 8B model (32); contexts are not equal."""
    results = []
    for heads in (16,) if dry_run else (16, 32):
        for num_sequences, context in ((2, 40),) if dry_run else _DECODES:
            for piece in _PIECES[-1:] if dry_run else _PIECES:
                case = _decode(device, heads, num_sequences, context, piece)
                case["share_of_copy"] = case["bytes_per_s"] / ceilings.bytes_per_s
                results.append(case)
                print(_decode_line(case), flush=True)
        for num_sequences, length in ((1, 20),) if dry_run else _PREFILLS:
            results.append(_prefill(device, heads, num_sequences, length))
            print(_prefill_line(results[-1]), flush=True)
        for tree in ((1, 2, 512, 0),) if dry_run else _TREES:
            results.append(_shared(device, heads, *tree))
            print(_shared_line(results[-1]), flush=True)
    return results


class _Pool:
    """Several layers' caches, and tables of blocks that lie scattered."""

    def __init__(self, device: torch.device, context_lens: list[int]) -> None:
        blocks = [-(-length // _BLOCK) for length in context_lens]
        self.bytes_per_layer = sum(context_lens) * 2 * _KV_HEADS * _WIDTH * 2
        rotated = 1 if device.type == "cpu" else _ROTATED_BYTES // self.bytes_per_layer
        self.layers = max(1, min(16, rotated))
        dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
        shape = (sum(blocks), self.layers, 2, _KV_HEADS, _BLOCK, _WIDTH)
        self.pool = torch.randn(shape, device=device, dtype=dtype)
        slots = torch.randperm(sum(blocks), device=device, dtype=torch.int32)
        tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32, device=device)
        for row, part in enumerate(slots.split(blocks)):
            tables[row, : len(part)] = part
        self.tables = tables
        self.context_lens = torch.tensor(context_lens, dtype=torch.int32, device=device)

    def attend(self, query: torch.Tensor, query_starts: torch.Tensor, **options: Any) -> None:
        out = torch.empty_like(query)
        for layer in range(self.layers):
            keys, values = self.pool[:, layer, 0], self.pool[:, layer, 1]
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


def _decode(
    device: torch.device, heads: int, num_sequences: int, context: int, piece: int
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    spread = torch.randint(context // 2, 3 * context // 2, (num_sequences,), generator=generator)
    pool = _Pool(device, spread.tolist())
    query = torch.randn(num_sequences, heads, _WIDTH, device=device, dtype=pool.pool.dtype)
    starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=device)
    usual, decode_work.DECODE_PIECE = decode_work.DECODE_PIECE, piece

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

    try:
        taken = seconds(run, device) / pool.layers
    finally:
        decode_work.DECODE_PIECE = usual
    return {
        "kind": "decode",
        "heads": heads,
        "sequences": num_sequences,
        "context": context,
        "piece": piece,
        "bytes": pool.bytes_per_layer,
        "seconds": taken,
        "bytes_per_s": pool.bytes_per_layer / taken,
    }


def _shared(
    device: torch.device, heads: int, rows: int, samples: int, prefix: int, prompt: int
) -> dict[str, Any]:
    """Samples of rows below one prefix: the same step with the tree told, and without."""
    count, context = rows * samples, prefix + prompt + _OWN
    pool = _Pool(device, [context] * count)
    for row in range(rows):
        of_row = slice(row * samples, (row + 1) * samples)
        pool.tables[of_row, : prefix // _BLOCK] = pool.tables[0, : prefix // _BLOCK]
        of_prompt = slice(prefix // _BLOCK, (prefix + prompt) // _BLOCK)
        pool.tables[of_row, of_prompt] = pool.tables[row * samples, of_prompt].clone()
    query = torch.randn(count, heads, _WIDTH, device=device, dtype=pool.pool.dtype)
    starts = torch.arange(count + 1, dtype=torch.int32, device=device)
    lens = torch.full((count,), prefix + prompt, dtype=torch.int32, device=device)
    lens[::samples], lens[0] = prefix, 0
    tree = {"order": starts[:-1].clone(), "shared_lens": lens}

    def run(**told: torch.Tensor) -> None:
        work = plan_decode(
            starts,
            pool.context_lens,
            **told,
            num_heads=heads,
            num_kv_heads=_KV_HEADS,
            value_width=_WIDTH,
            max_context_len=context,
            num_launches=pool.layers,
        )
        pool.attend(query, starts, max_query_len=1, work=work)

    combined_output = seconds(lambda: run(**tree), device) / pool.layers
    apart = seconds(run, device) / pool.layers
    return {
        "kind": "shared",
        "heads": heads,
        "rows": rows,
        "samples": samples,
        "prefix": prefix,
        "prompt": prompt,
        "seconds": combined_output,
        "seconds_apart": apart,
    }


def _prefill(device: torch.device, heads: int, num_sequences: int, length: int) -> dict[str, Any]:
    pool = _Pool(device, [length] * num_sequences)
    tokens = num_sequences * length
    query = torch.randn(tokens, heads, _WIDTH, device=device, dtype=pool.pool.dtype)
    starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * length
    taken = seconds(
        lambda: pool.attend(query, starts, max_query_len=length, min_query_len=length), device
    )
    flops = 4 * heads * _WIDTH * num_sequences * length * (length + 1) / 2
    return {
        "kind": "prefill",
        "heads": heads,
        "sequences": num_sequences,
        "length": length,
        "seconds": taken / pool.layers,
        "flop_per_s": flops * pool.layers / taken,
    }


def _decode_line(case: dict[str, Any]) -> str:
    return (
        f"decode   {case['heads']} heads  {case['sequences']:>4} x ~{case['context']:<5} "
        f"{case['bytes'] / 1e6:>6.0f} MB  pieces of {case['piece']}  "
        f"{case['bytes_per_s'] / 1e9:>6.0f} GB/s  {case['share_of_copy']:.2f} of copy"
    )


def _shared_line(case: dict[str, Any]) -> str:
    return (
        f"shared   {case['heads']} heads  {case['rows']:>4} x {case['samples']} below "
        f"{case['prefix']} + {case['prompt']}  {case['seconds'] * 1e6:>6.0f} us a layer, apart "
        f"{case['seconds_apart'] * 1e6:.0f}"
    )


def _prefill_line(case: dict[str, Any]) -> str:
    return (
        f"prefill  {case['heads']} heads  {case['sequences']:>4} x {case['length']:<5}  "
        f"{case['flop_per_s'] / 1e12:>6.1f} TFLOP/s"
    )
