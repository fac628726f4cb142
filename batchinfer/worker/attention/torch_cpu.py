"""Paged attention on the CPU from torch operations: gather blocks, multiply, softmax, multiply."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from batchinfer.engine.kv.kv_shapes import KVShape
from batchinfer.engine.step import Step
from batchinfer.worker.attention.gather_plan import Bucket, Plan, make_plan
from batchinfer.worker.attention.variant import AttentionVariant
from batchinfer.worker.kv_cache import KVCache


class CpuAttention:
    """Attends over the pool's blocks for one step at a time.

    Buffers for gathered keys, values and scores are kept between calls, because new buffers would
    cost page faults. Scores are masked by selection, and values that no query may see are zeroed,
    so that stale NaN in the pool reaches no output. A float8 pool is widened after gathering.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._buffers: dict[str, torch.Tensor] = {}
        self._plans: dict[tuple[int, int, KVShape], Plan] = {}
        """Plans of the step, by layer group, window and KV shape."""

    def begin_step(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        self._step = step
        self._plans.clear()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [T, Hq, Dk]
        variant: AttentionVariant,
    ) -> torch.Tensor:
        window, softcap = variant.sliding_window, variant.softcap
        group, shape = self._cache.group(layer), self._cache.shape(layer)
        if (group, window, shape) not in self._plans:
            plan = make_plan(self._step, self._cache, window, layer)
            self._plans[group, window, shape] = plan
        plan = self._plans[group, window, shape]
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
        """Return an uninitialized tensor of this shape, in memory that later calls reuse."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
            buffer = self._buffers[name] = torch.empty(size + size // 4, dtype=dtype)
        return buffer[:size].view(shape)


def _share_beside_sinks(
    scores: torch.Tensor,  # [R, Hkv, heads per KV head, Q, C], masked
    sinks: torch.Tensor,  # [Hq]
) -> torch.Tensor:  # [R * Hkv, heads per KV head * Q, 1] float32
    """Return the share of the softmax that a sink (one more logit, without a value) leaves to keys.

    exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink).
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
