"""Builds the engine of an encoder model, which has no KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from batchinfer.builders.context import EngineContext
from batchinfer.builders.device import describe, set_threads
from batchinfer.builders.tokenizer import make_tokenizer
from batchinfer.config import EngineConfig, ModelConfig, sized_for
from batchinfer.console.phases import phase
from batchinfer.engine.encoder_engine import EncoderEngine
from batchinfer.text.tokenizer import Tokenizer
from batchinfer.worker.encoder.loader import check_encoder_invariance, load_encoder
from batchinfer.worker.encoder.runner import ModelEncoder
from batchinfer.worker.linear.kernel_choice import KernelRequirements
from batchinfer.worker.threads.threads import StepThreads

_OF_POOLS = (
    *("block_size", "kv_cache_memory", "num_kv_blocks", "kv_cache_dtype", "latent_cache"),
    *("enable_prefix_caching", "preemption", "swap_space"),
)
"""Keys of the engine that configure a KV cache."""


def build_encoder(
    model: ModelConfig,
    engine: EngineConfig,
    device: torch.device,
    log: Callable[[str], None],
    pinned_kernels: Mapping[str, str],
    tokenizer: Tokenizer | None,
) -> EngineContext:
    """Load an encoder model and make its engine; raise the same errors as ``build_engine``."""
    engine = sized_for(device.type, engine)
    thread_count = set_threads(device, engine, log)
    if tokenizer is None:
        with phase("loading the tokenizer"):
            tokenizer = make_tokenizer(model)
    required = KernelRequirements(engine.cpu_kernels, engine.deterministic, pinned_kernels)
    loaded = load_encoder(model, device=device, kernels=required)
    log(str(loaded.kernels))
    defaults = EngineConfig()
    if unused := [name for name in _OF_POOLS if getattr(engine, name) != getattr(defaults, name)]:
        names = ", ".join(f"engine.{name}" for name in unused)
        log(f"encoders have no KV pool, so these settings have no effect: {names}")
    longest = loaded.description.max_model_len
    if engine.deterministic:
        check_encoder_invariance(loaded)
    threads = None
    if thread_count is not None:
        threads = StepThreads(thread_count, governed=loaded.kernels.is_batch_invariant)
    return EngineContext(
        engine=EncoderEngine(
            ModelEncoder(loaded.encoder, device, threads),
            max_model_len=longest,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            vocab_size=loaded.description.vocab_size,
        ),
        tokenizer=tokenizer,
        max_model_len=longest,
        vocab_size=loaded.description.vocab_size,
        device=describe(device),
        model_facts=loaded.facts,
        kernels=loaded.kernel_names,
        device_bytes=lambda: int(loaded.facts["weight_bytes"]),
    )
