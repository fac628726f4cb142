"""Read-only settings and metrics of an ``LLM`` under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

from batchinfer.builders.context import EngineContext
from batchinfer.config import EngineConfig, ModelConfig
from batchinfer.llm.pooling.runner import PoolingRunner


class ModelView(SimpleNamespace):
    """Settings of the model in the form of vLLM's ``ModelConfig``."""

    embedder: PoolingRunner

    @property
    def embedding_size(self) -> int:
        """Number of dimensions of an embedding; reads the model's files."""
        return self.embedder.embedding_size

    def get_vocab_size(self) -> int:
        return int(self.vocab_size)


class EngineView:
    """Read-only view of the engine in the form of vLLM's ``LLMEngine``."""

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        context: EngineContext,
        embedder: PoolingRunner,
    ) -> None:
        self._engine = context.engine
        self.model_executor: object = None
        """Always None. Programs written for vLLM delete this attribute to free memory."""
        self.model_config = ModelView(
            model=model.name,
            tokenizer=model.tokenizer or model.name,
            dtype=model.dtype,
            quantization=model.quantization,
            max_model_len=context.max_model_len,
            vocab_size=context.vocab_size,
            embedder=embedder,
        )
        self.cache_config = SimpleNamespace(
            block_size=context.block_size,
            num_gpu_blocks=context.num_blocks,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            cache_dtype=engine.kv_cache_dtype,
            enable_prefix_caching=engine.enable_prefix_caching,
        )
        self.vllm_config = SimpleNamespace(
            model_config=self.model_config,
            cache_config=self.cache_config,
            scheduler_config=engine,  # attributes have the same names
        )

    def get_model_config(self) -> ModelView:
        return self.model_config

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that are waiting or running; 0 unless a call is active."""
        return self._engine.num_unfinished

    def has_unfinished_requests(self) -> bool:
        """Return True if any request is waiting or running."""
        return self._engine.num_unfinished > 0


@dataclass(frozen=True, slots=True)
class Metric:
    """A number with its name and labels."""

    name: str
    labels: dict[str, str]
    value: float


class Counter(Metric):
    """A whole number that only grows, until ``LLM.reset_stats``."""


class Gauge(Metric):
    """A number that can rise and fall."""


_COUNTERS: Mapping[str, tuple[str, str]] = {
    "vllm:prompt_tokens": ("tokens", "prompt"),
    "vllm:generation_tokens": ("tokens", "output"),
    "vllm:prefix_cache_queries": ("tokens", "prompt"),
    "vllm:prefix_cache_hits": ("tokens", "prompt_cached"),
    "vllm:num_preemptions": ("kv", "preemptions"),
}
"""Section and key in ``LLM.stats`` of each of vLLM's metrics (vllm/v1/metrics/loggers.py)."""


def read_metrics(
    stats: Mapping[str, Mapping[str, float]], context: EngineContext, model: str
) -> list[Metric]:
    """Return the counters and gauges of an engine.

    Args:
        stats: the result of ``LLM.stats``.
    """
    labels, engine = {"model_name": model, "engine": "0"}, context.engine
    return [
        *(Counter(name, labels, int(stats[at][key])) for name, (at, key) in _COUNTERS.items()),
        Gauge("vllm:num_requests_running", labels, float(engine.num_running)),
        Gauge("vllm:num_requests_waiting", labels, float(engine.num_waiting)),
    ]
