"""``EngineContext``: an engine and its model, for jobs and for the Python API."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from batchinfer.config import SamplingParams
from batchinfer.engine.encoder_engine import EncoderEngine
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.text.tokenizer import Tokenizer
from batchinfer.worker.loader import ModelDescription
from batchinfer.worker.memory import MemoryPlan
from batchinfer.worker.vision.support import ImageSupport


class WarmUp(Protocol):
    """Compiles the sampling kernels that some parameters need, before the steps that use them."""

    def __call__(
        self,
        params: Iterable[SamplingParams],
        *,
        own: Collection[str] = (),
        forced_tokens: bool = False,
    ) -> None:
        """Compile the kernels that are not compiled yet.

        Args:
            own: names of parameters that individual rows may set themselves.
            forced_tokens: True if the tokens of samples are forced instead of sampled.
        """


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """An engine and its model; the defaults describe a model without a KV cache."""

    engine: Engine | EncoderEngine
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    device: str
    model_facts: Mapping[str, Any]
    kernels: Mapping[str, str]
    """Kernel names. The key is "attention", or for linear layers, the dtype of their weights."""
    device_bytes: Callable[[], int]
    """Returns the number of bytes of device memory in use."""
    eos_token_ids: frozenset[int] = frozenset()
    adapters: Mapping[str, int] = field(default_factory=dict)
    """Numbers of the model's adapters, keyed by name, for ``Request.adapter``."""
    block_size: int = 0
    """Tokens per block; 0 without a KV cache."""
    num_blocks: int = 0
    bytes_per_block: int = 0
    memory: MemoryPlan | None = None
    """None without a KV cache."""
    shares_prefixes: bool = False
    """True if prompts can share the KV of a common prefix. If False, a job is fastest when prompts
    of the same length run together."""
    slots_per_state: int = 0
    """Number of blocks that a sequence's recurrent state takes; 0 without recurrent layers."""
    embedding_size: Callable[[], int] = lambda: 0
    """Returns the size H of the embeddings that a prompt may have in place of token ids; 0 if the
    model needs token ids."""
    images: ImageSupport | None = None
    """How to process images; None if the model takes only text."""
    load_adapter: Callable[[str, str], None] | None = None
    """Loads an adapter, given its name and folder, while no step runs; None if no adapters can be
    added."""
    warm_up: WarmUp | None = None
    """Compiles sampling kernels; None on devices that compile none."""


def pool_fields(model: ModelDescription, layout: KVLayout, memory: MemoryPlan) -> dict[str, Any]:
    """Return the fields of ``EngineContext`` that a model and its KV cache determine."""
    return {
        "max_model_len": model.max_model_len,
        "vocab_size": model.vocab_size,
        "eos_token_ids": model.eos_token_ids,
        "adapters": model.adapters,
        "block_size": layout.tokens_per_block,
        "num_blocks": memory.num_blocks,
        "bytes_per_block": layout.bytes_per_block,
        "memory": memory,
        "shares_prefixes": True,
        "slots_per_state": layout.slots_per_state,
    }
