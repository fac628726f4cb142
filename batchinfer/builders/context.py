"""An engine with a model behind it, as jobs and calls from Python see it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

from batchinfer.config import SamplingParams
from batchinfer.engine.encoder_engine import EncoderEngine
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.text.tokenizer import Tokenizer
from batchinfer.worker.encoder.description import EncoderDescription
from batchinfer.worker.loader import ModelDescription
from batchinfer.worker.memory import MemoryPlan


class WarmUp(Protocol):
    """Compiles what steps need of samples with such parameters, before the first of them."""

    def __call__(
        self,
        params: Iterable[SamplingParams],
        *,
        own: Collection[str] = (),
        forced_tokens: bool = False,
    ) -> None:
        """Compile what is not compiled yet.

        Args:
            params: those of a job, or all that a call has.
            own: names of parameters that each row may have another value of.
            forced_tokens: every sample's token is given, not drawn.
        """


@dataclass(frozen=True)
class EngineContext:
    """An engine with a model behind it, and what its users need to know of them."""

    engine: Engine | EncoderEngine
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    adapters: Mapping[str, int]
    """Number of each of the model's adapters, for ``Request.adapter``."""
    block_size: int
    num_blocks: int
    bytes_per_block: int
    device: str
    model_facts: Mapping[str, Any]
    kernels: Mapping[str, str]
    """What multiplies by the weights, by their dtype, and what attends."""
    device_bytes: Callable[[], int]
    """Memory in use on the device now."""
    shares_prefixes: bool = True
    """Whether what a prompt begins with can be reused; else prompts of a length run best side by
    side."""
    load_adapter: Callable[[str, str], None] | None = field(default=None, kw_only=True)
    """Adds one between steps, by its name and folder; None: the model was not built for it."""
    warm_up: WarmUp | None = field(default=None, kw_only=True)
    """Compiles what steps draw and judge tokens by; None: nothing is compiled."""


class ContextFields(TypedDict):
    """Some of the fields of ``EngineContext``."""

    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    adapters: Mapping[str, int]
    block_size: int
    num_blocks: int
    bytes_per_block: int
    shares_prefixes: bool


def encoder_fields(description: EncoderDescription) -> ContextFields:
    """The fields of ``EngineContext`` that follow from a model without a pool."""
    return {
        "eos_token_ids": frozenset(),
        "max_model_len": description.max_model_len,
        "vocab_size": description.vocab_size,
        "adapters": {},
        "block_size": 0,
        "num_blocks": 0,
        "bytes_per_block": 0,
        "shares_prefixes": False,
    }


def context_fields(model: ModelDescription, layout: KVLayout, memory: MemoryPlan) -> ContextFields:
    """The fields of ``EngineContext`` that follow from a model and its pool."""
    return {
        "eos_token_ids": model.eos_token_ids,
        "max_model_len": model.max_model_len,
        "vocab_size": model.vocab_size,
        "adapters": model.adapters,
        "block_size": layout.block_size,
        "num_blocks": memory.num_blocks,
        "bytes_per_block": layout.bytes_per_block,
        "shares_prefixes": True,
    }
