"""Numbers of all calls so far under vLLM's names, as ``LLM.get_metrics`` gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A number with its name, and what tells it from others of that name."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A whole number that only grows, until ``LLM.reset_stats``."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A number of this moment."""

    value: float


_COUNTERS: Mapping[str, tuple[str, str]] = {
    "vllm:prompt_tokens": ("tokens", "prompt"),
    "vllm:generation_tokens": ("tokens", "output"),
    "vllm:prefix_cache_queries": ("tokens", "prompt"),
    "vllm:prefix_cache_hits": ("tokens", "prompt_cached"),
    "vllm:num_preemptions": ("kv", "preemptions"),
}
"""Section and key of ``LLM.stats`` by vLLM's name (vllm/v1/metrics/loggers.py)."""


def read_metrics(
    stats: Mapping[str, Mapping[str, float]], model: str, *, num_running: int, num_waiting: int
) -> list[Metric]:
    """Counters and gauges of an engine.

    Args:
        stats: as ``LLM.stats`` gives them.
        num_running: sequences that run now.
        num_waiting: requests that do not yet.
    """
    labels = {"model_name": model, "engine": "0"}
    return [
        *(
            Counter(name, labels, int(stats[section][key]))
            for name, (section, key) in _COUNTERS.items()
        ),
        Gauge("vllm:num_requests_running", labels, float(num_running)),
        Gauge("vllm:num_requests_waiting", labels, float(num_waiting)),
    ]
