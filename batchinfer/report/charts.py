"""A report's charts: which series they show, in which colours, under which names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from batchinfer.console.format import size
from batchinfer.report.drawing.over_time import Layer, Series
from batchinfer.report.report_data import Findings
from batchinfer.report.timeline import Timeline
from batchinfer.report.units import amount

_ON_ONE_SCALE = 1.5
"""The whole pool is drawn where it is at most so many times what else is."""


def all_series(found: Findings) -> Mapping[str, Series]:
    """What each chart over time shows, by its name on the page; of a pool, if there is one."""
    timeline = found.timeline
    of_pool = {
        "memory": memory(timeline),
        "held": held_by_rows(timeline),
        "pool": whole_pool(timeline),
    }
    return {
        **(of_pool if found.has_pool else {}),
        "running": running(timeline, found.unit),
        "tokens": tokens_per_second(timeline, draws=found.draws),
        "waiting": waiting(timeline),
    }


def memory(timeline: Timeline) -> Series:
    """The memory that running rows took and would have taken, one drawn over the other."""
    states = timeline.states
    reserved = states("contiguous_blocks")
    layers = [
        Layer("contiguous", "reserved: prompt and longest answer", reserved),
        Layer("logical", "paged alone: nothing shared", states("kv_logical_blocks")),
        Layer("used", "paged and shared: what they took", states("kv_blocks_used")),
        *_pool_line(timeline, float(reserved.max(initial=0))),
    ]
    name = "the memory that running rows take"
    return Series(name, timeline.edges_s, layers, "bytes", size, stacked=False)


def held_by_rows(timeline: Timeline) -> Series:
    """The blocks that running rows hold, by how many rows hold them, and what that saves."""
    used, waste = timeline.states("kv_blocks_used"), timeline.states("waste_blocks")
    saved = np.maximum(timeline.states("kv_logical_blocks") - used, 0)
    # What is shared are full blocks nearly always; where it is not, its empty slots are waste.
    shared = np.minimum(timeline.states("kv_blocks_shared"), used - waste)
    layers = [
        Layer("used", "used by one row", used - shared - waste),
        Layer("waste", "empty slots", waste),
        Layer("shared", "used by several", shared),
        Layer("saved", "not needed: those are shared", saved),
    ]
    return Series("the blocks that running rows hold", timeline.edges_s, layers, "bytes", size)


def whole_pool(timeline: Timeline) -> Series:
    """The blocks that running rows hold, and those that are kept for rows to come."""
    used, kept = timeline.states("kv_blocks_used"), timeline.states("kv_blocks_cached")
    layers = [
        Layer("used", "held by running rows", used),
        Layer("cached", "kept for rows to come", kept),
        *_pool_line(timeline, float((used + kept).max(initial=0))),
    ]
    return Series("what the pool's blocks hold", timeline.edges_s, layers, "bytes", size)


def running(timeline: Timeline, unit: str) -> Series:
    """The sequences that run, and those whose blocks are on the host."""
    layers = [Layer("used", "running", timeline.states("num_running"))]
    swapped = timeline.states("num_swapped")
    if swapped.any():
        layers.append(Layer("swapped", "set aside: blocks on the host", swapped))
    return Series(f"{unit} that run", timeline.edges_s, layers, unit, partial(amount, unit=unit))


def waiting(timeline: Timeline) -> Series:
    """The rows in the engine's queue."""
    layers = [Layer("idle", "waiting", timeline.states("num_waiting"))]
    say = partial(amount, unit="rows")
    return Series("rows in the queue", timeline.edges_s, layers, "rows", say)


def tokens_per_second(timeline: Timeline, *, draws: bool) -> Series:
    """Tokens per second: of prompts, recomputed, of answers if any are drawn."""
    again = timeline.rate("recomputed_tokens")
    layers = [Layer("used", "answers", timeline.rate("decode_tokens"))] if draws else []
    prompts = np.maximum(timeline.rate("prefill_tokens") - again, 0)
    layers.append(Layer("shared", "prompts", prompts))
    if again.any():
        layers.append(Layer("again", "computed again", again))
    say = partial(amount, unit="tokens/s")
    return Series("tokens per second", timeline.edges_s, layers, "tokens/s", say)


def _pool_line(timeline: Timeline, most_bytes: float) -> list[Layer]:
    """The pool's size as a line, where it is on the scale of what else is drawn."""
    total = timeline.states("kv_blocks_total")
    fits = total.max(initial=0) <= _ON_ONE_SCALE * most_bytes
    return [Layer("ink", "the whole pool", total, is_line=True)] if fits else []
