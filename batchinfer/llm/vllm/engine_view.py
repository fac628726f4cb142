"""What programs read of vLLM's ``LLM.llm_engine`` and its configurations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from batchinfer.builders.context import EngineContext
from batchinfer.config import EngineConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class ModelView:
    """The model that runs."""

    model: str
    """Hub id or folder."""
    tokenizer: str
    dtype: str
    """As it was asked for: ``auto`` is as saved."""
    quantization: str | None
    max_model_len: int
    vocab_size: int
    _embedding_size: Callable[[], int] = field(repr=False, compare=False)

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding."""
        return self._embedding_size()

    def get_vocab_size(self) -> int:
        """Token ids are below it."""
        return self.vocab_size


@dataclass(frozen=True, slots=True)
class CacheView:
    """The KV pool."""

    block_size: int
    num_gpu_blocks: int
    """Blocks in the pool, whichever the device."""
    gpu_memory_utilization: float
    cache_dtype: str
    enable_prefix_caching: bool


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The sizes of a step, as they were asked for."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class ConfigView:
    """All of these, under vLLM's names."""

    model_config: ModelView
    cache_config: CacheView
    scheduler_config: SchedulerView


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine of an ``LLM``, to read: it is run by the calls of that alone."""

    vllm_config: ConfigView
    _count_unfinished: Callable[[], int]

    @property
    def model_config(self) -> ModelView:
        """The model that runs."""
        return self.vllm_config.model_config

    @property
    def cache_config(self) -> CacheView:
        """The KV pool."""
        return self.vllm_config.cache_config

    def get_model_config(self) -> ModelView:
        """The model that runs, by vLLM's earlier name."""
        return self.model_config

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run: 0 unless a call is under way."""
        return self._count_unfinished()

    def has_unfinished_requests(self) -> bool:
        """Whether any waits or runs."""
        return self._count_unfinished() > 0


def engine_view(
    model: ModelConfig,
    engine: EngineConfig,
    context: EngineContext,
    embedding_size: Callable[[], int],
) -> EngineView:
    """The view of an engine that is built.

    Args:
        embedding_size: numbers of an embedding; the model's files are read for it.
    """
    config = ConfigView(
        ModelView(
            model=model.name,
            tokenizer=model.tokenizer or model.name,
            dtype=model.dtype,
            quantization=model.quantization,
            max_model_len=context.max_model_len,
            vocab_size=context.vocab_size,
            _embedding_size=embedding_size,
        ),
        CacheView(
            block_size=context.block_size,
            num_gpu_blocks=context.num_blocks,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            cache_dtype=engine.kv_cache_dtype,
            enable_prefix_caching=engine.enable_prefix_caching,
        ),
        SchedulerView(engine.max_num_seqs, engine.max_num_batched_tokens),
    )
    return EngineView(config, lambda: context.engine.num_unfinished)
