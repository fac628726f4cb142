"""The charts of a report: their series, colors and labels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from batchinfer.console.format import size
from batchinfer.report.report_data import ReportData
from batchinfer.report.svg import Layer, Series
from batchinfer.report.timeline import Timeline
from batchinfer.report.units import amount

_ON_ONE_SCALE = 1.5
"""A chart shows the pool's size if that size is at most this many times the chart's highest value.
"""


def all_series(data: ReportData) -> Mapping[str, Series]:
    """Return the series of each chart over time, keyed by the chart's name on the page."""
    timeline = data.timeline
    pool = {
        "memory": memory(timeline),
        "held": held_by_rows(timeline),
        "pool": whole_pool(timeline),
    }
    return {
        **(pool if data.has_pool else {}),
        "running": running(timeline, f"{data.unit}s"),
        "tokens": tokens_per_second(timeline, draws=data.draws),
        "waiting": waiting(timeline),
    }


def memory(timeline: Timeline) -> Series:
    """Return the memory of running rows: as used, without sharing, and allocated contiguously."""
    mean = timeline.mean
    reserved = mean("contiguous_blocks")
    layers = [
        Layer("contiguous", "contiguous: room for the longest answer", reserved),
        Layer("logical", "paged, but nothing shared", mean("kv_logical_blocks")),
        Layer("used", "paged and shared: the memory in use", mean("kv_blocks_used")),
        *_pool_line(timeline, float(reserved.max(initial=0))),
    ]
    name = "the memory that running rows take"
    return Series(name, timeline.edges_s, layers, "bytes", size, stacked=False)


def held_by_rows(timeline: Timeline) -> Series:
    """Return blocks held by one row or by several rows, and blocks saved by sharing."""
    used, waste = timeline.mean("kv_blocks_used"), timeline.mean("waste_blocks")
    saved = np.maximum(timeline.mean("kv_logical_blocks") - used, 0)
    # Shared blocks are nearly always full, so count all empty slots as part of unshared blocks.
    shared = np.minimum(timeline.mean("kv_blocks_shared"), used - waste)
    layers = [
        Layer("used", "held by one row", used - shared - waste),
        Layer("waste", "empty slots", waste),
        Layer("shared", "used by several", shared),
        Layer("saved", "saved by sharing", saved),
    ]
    return Series("the blocks that running rows hold", timeline.edges_s, layers, "bytes", size)


def whole_pool(timeline: Timeline) -> Series:
    """Return blocks that running rows hold, and blocks kept for later rows."""
    used, kept = timeline.mean("kv_blocks_used"), timeline.mean("kv_blocks_cached")
    layers = [
        Layer("used", "held by running rows", used),
        Layer("cached", "kept for later rows", kept),
        *_pool_line(timeline, float((used + kept).max(initial=0))),
    ]
    return Series("the blocks of the pool", timeline.edges_s, layers, "bytes", size)


def running(timeline: Timeline, unit: str) -> Series:
    """Return sequences that run, and sequences whose blocks are on the host."""
    layers = [Layer("used", "running", timeline.mean("num_running"))]
    swapped = timeline.mean("num_swapped")
    if swapped.any():
        layers.append(Layer("swapped", "swapped: blocks on the host", swapped))
    return Series(f"{unit} that run", timeline.edges_s, layers, unit, partial(amount, unit=unit))


def waiting(timeline: Timeline) -> Series:
    layers = [Layer("idle", "waiting", timeline.mean("num_waiting"))]
    format_value = partial(amount, unit="rows")
    return Series("rows in the queue", timeline.edges_s, layers, "rows", format_value)


def tokens_per_second(timeline: Timeline, *, draws: bool) -> Series:
    """Return tokens per second: prompt tokens, recomputed tokens, and answer tokens if any."""
    again = timeline.mean("recomputed_tokens")
    layers = [Layer("used", "answers", timeline.mean("decode_tokens"))] if draws else []
    prompts = np.maximum(timeline.mean("prefill_tokens") - again, 0)
    layers.append(Layer("shared", "prompts", prompts))
    if again.any():
        layers.append(Layer("again", "computed again", again))
    format_value = partial(amount, unit="tokens/s")
    return Series("tokens per second", timeline.edges_s, layers, "tokens/s", format_value)


def _pool_line(timeline: Timeline, most_bytes: float) -> list[Layer]:
    total = timeline.mean("kv_blocks_total")
    fits = total.max(initial=0) <= _ON_ONE_SCALE * most_bytes
    return [Layer("ink", "the whole pool", total, is_line=True)] if fits else []
