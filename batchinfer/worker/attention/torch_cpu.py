"""Paged attention on the CPU from torch operations: gather blocks, multiply, softmax, multiply.

The queries of a step become tiles of 1, 16 or 64 tokens of one sequence. Tiles of equal size and
similar context length form a bucket and are padded to the bucket's longest context. A bucket's
padding and the size of its gathered blocks are limited. All layers with the same KV shape and
window share one plan per step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from batchinfer.engine.kv.kv_shapes import KVShape
from batchinfer.engine.step import Int32, Step
from batchinfer.worker.attention.variant import AttentionVariant
from batchinfer.worker.kv_cache import KVCache

_TILE_SIZES = (1, 16, 64)
# Largest number of bytes that a bucket gathers. A larger bucket's keys and values would leave the
# processor's cache before attention uses them.
_BUCKET_BYTES = 4 << 20
# Overhead of a bucket, expressed as the number of bytes that can be gathered in the same time.
# Starting a new bucket saves time only if it avoids more padding than this.
_BUCKET_OVERHEAD_BYTES = 512 << 10
_PADDING_SHARE = 0.125

Ints = npt.NDArray[np.int64]


class CpuAttention:
    """Attends over the pool's blocks for one step at a time.

    Buffers for gathered keys, values and scores are kept between calls, because new buffers would
    cost page faults. A stale NaN in the pool must not reach an output, so masked scores are
    overwritten, and values that no query may see are zeroed. Float8 elements are converted after
    gathering.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._buffers: dict[str, torch.Tensor] = {}
        self._plans: dict[tuple[int, int, KVShape, bool, bool], Plan] = {}
        """Plans of the step, keyed by layer group, window, KV shape,
        ``AttentionVariant.ignores_query_ends``, and whether the window hides the prompt."""

    def begin_step(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        self._step = step
        self._plans.clear()

    def attend(self, layer: int, query: torch.Tensor, variant: AttentionVariant) -> torch.Tensor:
        options = variant.options(self._step.prompt_lens)
        window, prompt_lens = options["sliding_window"], options["prompt_lens"]
        softcap = variant.softcap
        group, shape = self._cache.group(layer), self._cache.shape(layer)
        key = group, window, shape, variant.ignores_query_ends, prompt_lens is None
        if key not in self._plans:
            step = replace(self._step, query_ends=None) if key[3] else self._step
            self._plans[key] = make_plan(step, self._cache, window, layer, prompt_lens)
        plan = self._plans[key]
        queries = query.index_select(0, plan.tokens)
        attended = query.new_empty(len(queries), query.shape[1], shape.value_width)
        for bucket in plan.buckets:
            keys = self._keys(bucket, layer, query.dtype)
            scores = self._scores(bucket, queries[bucket.queries], keys, shape, variant.scale)
            if softcap:
                scores.div_(softcap).tanh_().mul_(softcap)
            # [R, Hkv, heads per KV head, Q, C]
            by_head = scores.view(
                bucket.num_tiles, shape.num_kv_heads, -1, bucket.tile_size, bucket.context
            )
            by_head[..., bucket.all_visible :].masked_fill_(bucket.hidden, float("-inf"))
            values = self._values(bucket, layer, keys)
            weighed = self._weigh(scores, values)
            if variant.sinks is not None:
                weighed *= _share_beside_sinks(by_head, variant.sinks).to(weighed.dtype)
            _store(weighed, attended[bucket.queries], bucket)
        return attended.index_select(0, plan.rows)

    def _keys(self, bucket: Bucket, layer: int, dtype: torch.dtype) -> torch.Tensor:
        """Return keys [R * Hkv, C, Dk], valid until the next call."""
        units = self._cache.units(layer, values=False)
        gathered = self._gather("keys", units, bucket.key_rows).to(dtype)
        return gathered.view(-1, bucket.context, self._cache.shape(layer).key_width)

    def _values(self, bucket: Bucket, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Return values [R * Hkv, C, Dv] without stale NaN; may overwrite ``keys``."""
        shape = self._cache.shape(layer)
        values = keys
        if not shape.values_in_keys:
            units = self._cache.units(layer, values=True)
            gathered = self._gather("values", units, bucket.value_rows).to(keys.dtype)
            values = gathered.view(-1, bucket.context, shape.value_width)
        values.view(-1, values.shape[2]).index_fill_(0, bucket.stale, 0.0)
        return values[..., : shape.value_width]

    def _scores(
        self,
        bucket: Bucket,
        queries: torch.Tensor,
        keys: torch.Tensor,  # [R * Hkv, C, Dk]
        shape: KVShape,
        scale: float,
    ) -> torch.Tensor:  # [R * Hkv, heads per KV head * Q, C]
        num_kv_heads, width = shape.num_kv_heads, shape.key_width
        tiled = queries.view(bucket.num_tiles, bucket.tile_size, -1, width).transpose(1, 2)
        tiled = tiled.reshape(bucket.num_tiles * num_kv_heads, -1, width)
        scores = self._buffer("scores", queries.dtype, (*tiled.shape[:2], bucket.context))
        return torch.baddbmm(scores, tiled, keys.transpose(1, 2), beta=0.0, alpha=scale, out=scores)

    def _weigh(
        self,
        scores: torch.Tensor,
        values: torch.Tensor,  # [R * Hkv, C, Dv]
    ) -> torch.Tensor:  # [R * Hkv, heads per KV head * Q, Dv]
        # For 16-bit scores, torch computes the softmax in float32 and rounds its result.
        weights = self._buffer("weights", scores.dtype, tuple(scores.shape))
        torch.softmax(scores, dim=-1, out=weights)
        return torch.bmm(weights, values)

    def _gather(self, name: str, source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out = self._buffer(name, source.dtype, (len(rows), source.shape[1]))
        return torch.index_select(source, 0, rows, out=out)

    def _buffer(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an uninitialized tensor in memory that later calls reuse."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
            buffer = self._buffers[name] = torch.empty(size + size // 4, dtype=dtype)
        return buffer[:size].view(shape)


def _share_beside_sinks(
    scores: torch.Tensor,  # [R, Hkv, heads per KV head, Q, C], masked
    sinks: torch.Tensor,  # [Hq]
) -> torch.Tensor:  # [R * Hkv, heads per KV head * Q, 1] float32
    """Return the share of the softmax that the keys get. The sink, an additional logit without a
    value, gets the rest.

    With the log-sum-exp ``lse`` of the scores, the share is exp(lse) / (exp(lse) + exp(sink)) =
    sigmoid(lse - sink).
    """
    num_tiles, num_kv_heads, _, _, _ = scores.shape
    per_head = sinks.float().view(1, num_kv_heads, -1, 1)
    left = torch.sigmoid(torch.logsumexp(scores.float(), dim=-1) - per_head)
    return left.view(num_tiles * num_kv_heads, -1, 1)


def _store(
    weighed: torch.Tensor,  # [R * Hkv, heads per KV head * Q, Dv]
    out: torch.Tensor,  # [R * Q, Hq, Dv]
    bucket: Bucket,
) -> None:
    tiles = (bucket.num_tiles, -1, bucket.tile_size, out.shape[2])
    by_token = out.view(bucket.num_tiles, bucket.tile_size, -1, out.shape[2])
    by_token.copy_(weighed.view(tiles).transpose(1, 2))


@dataclass(frozen=True, slots=True)
class Bucket:
    """R tiles of Q queries over a context of C tokens, gathered as whole blocks."""

    num_tiles: int  # R
    tile_size: int  # Q
    context: int  # C, a multiple of the block size
    queries: slice  # R * Q rows of Plan.tokens
    key_rows: torch.Tensor  # rows of KVCache.units, ordered [R, kv_head, block, unit]
    value_rows: torch.Tensor
    all_visible: int  # every query sees all positions below this number
    # [R, 1, 1, Q, C - all_visible] bool: true where the query does not see the position.
    hidden: torch.Tensor
    # Rows of values [R, kv_head, C] after the end of a context, in its last block.
    stale: torch.Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """Buckets of a step for one window, and the order of the step's queries in the buckets."""

    buckets: tuple[Bucket, ...]
    tokens: torch.Tensor  # [queries] index of each query's token; padding repeats a token
    rows: torch.Tensor  # [T] index in ``tokens`` of each of the step's tokens


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of queries, with one array per property. Positions count from the sequence's start."""

    sequence: Ints
    token: Ints  # index of the first query's token in the step
    length: Ints  # number of queries
    position: Ints  # position of the first query
    end: Ints  # one past the last position that any query sees
    first_block: Ints  # first block of the table that any query sees
    num_blocks: Ints
    size: Ints  # 1, 16 or 64

    def take(self, rows: Ints) -> _Tiles:
        return _Tiles(*(getattr(self, name)[rows] for name in self.__slots__))

    def offsets(self) -> Ints:
        """Return the index of each query in its tile, [R, Q]. Padding repeats the first query."""
        queries = np.arange(self.size[0])
        return np.where(queries < self.length[:, None], queries, 0)


def make_plan(
    step: Step,
    cache: KVCache,
    sliding_window: int,
    layer: int = 0,
    prompt_lens: Int32 | None = None,
) -> Plan:
    """Divide the step's queries into buckets, for all layers of a group that have the same KV
    shape.

    A window of 0 means that tokens see their whole context. If ``prompt_lens`` is given, tokens
    also see the first ``prompt_lens`` positions of their sequence, outside the window.
    """
    tiles = _tiles(step, cache.layout.block_size, 0 if prompt_lens is not None else sliding_window)
    token_bytes = cache.shape(layer).elements * cache.pool.element_size()
    block_bytes = cache.layout.block_size * token_bytes
    buckets: list[Bucket] = []
    tokens, real = [np.empty(0, np.int64)], [np.empty(0, np.bool_)]
    num_queries = 0
    for size in _TILE_SIZES:
        chosen = np.flatnonzero(tiles.size == size)
        if len(chosen) == 0:
            continue
        ordered = tiles.take(chosen[np.argsort(-tiles.num_blocks[chosen], kind="stable")])
        for rows in _rectangles(ordered.num_blocks, block_bytes):
            part = ordered.take(rows)
            queries = slice(num_queries, num_queries + len(rows) * size)
            buckets.append(_bucket(part, queries, step, cache, sliding_window, layer, prompt_lens))
            tokens.append((part.token[:, None] + part.offsets()).reshape(-1))
            real.append((np.arange(size) < part.length[:, None]).reshape(-1))
            num_queries = queries.stop
    all_tokens, is_real = np.concatenate(tokens), np.concatenate(real)
    rows_of = np.empty(step.num_tokens, np.int64)
    rows_of[all_tokens[is_real]] = np.flatnonzero(is_real)
    return Plan(tuple(buckets), torch.from_numpy(all_tokens), torch.from_numpy(rows_of))


def _tiles(step: Step, block_size: int, sliding_window: int) -> _Tiles:
    """Divide each sequence's queries into tiles of the largest size, and a smaller tile for the
    rest."""
    largest = _TILE_SIZES[-1]
    starts = step.query_starts.astype(np.int64)
    num_queries = np.diff(starts)
    tiles_each = -(-num_queries // largest)
    sequence = np.repeat(np.arange(len(num_queries)), tiles_each)
    within = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles_each) - tiles_each, tiles_each)
    offset = within * largest
    length = np.minimum(num_queries[sequence] - offset, largest)
    position = step.context_lens.astype(np.int64)[sequence] - num_queries[sequence] + offset
    first_seen = np.maximum(position + 1 - sliding_window, 0) if sliding_window else 0 * position
    first_block = first_seen // block_size
    token, end = starts[sequence] + offset, position + length
    if step.query_ends is not None:
        end = step.query_ends.astype(np.int64)[token + length - 1]
    return _Tiles(
        sequence=sequence,
        token=token,
        length=length,
        position=position,
        end=end,
        first_block=first_block,
        num_blocks=(end - 1) // block_size + 1 - first_block,
        size=np.array(_TILE_SIZES)[np.searchsorted(_TILE_SIZES, length)],
    )


def _rectangles(num_blocks: Ints, block_bytes: int) -> Iterator[Ints]:
    """Divide block counts, sorted in descending order, into runs small enough for a bucket. Yield
    the indices of each run."""
    free_padding = _BUCKET_OVERHEAD_BYTES // block_bytes
    begin = 0
    while begin < len(num_blocks):
        remaining = num_blocks[begin:]
        gathered = remaining[0] * np.arange(1, len(remaining) + 1)
        padding = gathered - np.cumsum(remaining)
        fits = (gathered * block_bytes <= _BUCKET_BYTES) & (
            padding <= np.maximum(free_padding, _PADDING_SHARE * gathered)
        )
        end = begin + max(1, len(remaining) if fits.all() else int(np.argmin(fits)))
        yield np.arange(begin, end)
        begin = end


def _bucket(
    tiles: _Tiles,
    queries: slice,
    step: Step,
    cache: KVCache,
    sliding_window: int,
    layer: int,
    prompt_lens: Int32 | None,
) -> Bucket:
    layout, shape, tables = cache.layout, cache.shape(layer), step.tables_of(cache.group(layer))
    num_blocks = int(tiles.num_blocks.max())
    context = num_blocks * layout.block_size
    key_rows, value_rows = _gather_rows(tiles, num_blocks, tables, cache, shape)
    position = tiles.position[:, None] + tiles.offsets()  # [R, Q]
    columns = (tiles.first_block * layout.block_size)[:, None] + np.arange(context)  # [R, C]
    all_visible = 0 if sliding_window else int((position[:, 0] - columns[:, 0]).min())
    columns_left = columns[:, None, all_visible:]
    distance = position[:, :, None] - columns_left
    hidden = distance < 0
    if step.query_ends is not None:
        hidden = columns_left >= step.query_ends[tiles.token[:, None] + tiles.offsets()][..., None]
    if sliding_window:
        outside = distance >= sliding_window
        if prompt_lens is not None:
            outside &= columns_left >= prompt_lens[tiles.sequence][:, None, None]
        hidden |= outside
    return Bucket(
        num_tiles=len(tiles.sequence),
        tile_size=int(tiles.size[0]),
        context=context,
        queries=queries,
        key_rows=key_rows,
        value_rows=value_rows,
        all_visible=all_visible,
        hidden=torch.from_numpy(hidden[:, None, None]),
        stale=_stale_values(tiles, columns, shape.num_kv_heads, layout.block_size),
    )


def _gather_rows(
    tiles: _Tiles, num_blocks: int, tables: Int32, cache: KVCache, shape: KVShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of ``cache.units`` to gather for keys and for values. Tiles are padded with
    rows of the null slot."""
    block = np.arange(num_blocks)
    columns = np.minimum(tiles.first_block[:, None] + block, tables.shape[1] - 1)
    slots = tables[tiles.sequence[:, None], columns].astype(np.int64)
    slots = np.where(block < tiles.num_blocks[:, None], slots, cache.null_slot)  # [R, block]

    def rows(width: int) -> torch.Tensor:
        units = width // cache.unit
        heads = np.arange(shape.num_kv_heads)[:, None, None] * units
        first = slots[:, None, :, None] * cache.rows_per_slot + heads
        return torch.from_numpy((first + np.arange(units)).reshape(-1))

    key_rows = rows(shape.key_width)
    if shape.values_in_keys or shape.value_width == shape.key_width:
        return key_rows, key_rows
    return key_rows, rows(shape.value_width)


def _stale_values(tiles: _Tiles, columns: Ints, num_kv_heads: int, block_size: int) -> torch.Tensor:
    """Return the rows of values after the end of each context in its last block. These rows may
    hold stale NaN."""
    end = tiles.end[:, None]
    block_end = -(-end // block_size) * block_size
    tile, column = np.nonzero((columns >= end) & (columns < block_end))
    head = np.arange(num_kv_heads)[:, None]
    rows = (tile * num_kv_heads + head) * columns.shape[1] + column
    return torch.from_numpy(rows.reshape(-1))
