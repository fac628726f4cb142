"""Builds an engine from the scheduler and the worker, which do not import each other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch

from batchinfer.builders.context import EngineContext, pool_fields
from batchinfer.builders.device import choose_device, describe, set_threads
from batchinfer.builders.tokenizer import make_tokenizer
from batchinfer.config import EngineConfig, ModelConfig, SamplingParams, sized_for
from batchinfer.console.phases import phase
from batchinfer.engine.encoder_engine import EncoderEngine
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.scheduler.preemption import PreemptionPolicy
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.errors import ModelError, NotYetError
from batchinfer.text.tokenizer import Tokenizer
from batchinfer.worker.attention.attention import ATTENTION, AttentionKernel
from batchinfer.worker.cuda_graphs.step_graphs import StepGraphs
from batchinfer.worker.encoder.encode_and_pool import ModelEncoder
from batchinfer.worker.encoder.encoder_config import is_run_as_encoder
from batchinfer.worker.encoder.loader import check_encoder_invariance, load_encoder
from batchinfer.worker.fusion.activations import replace_activations
from batchinfer.worker.fusion.native_layers import decoder_layers_of
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear.batch_invariance import check_batch_invariance
from batchinfer.worker.linear.kernel_choice import KernelRequirements
from batchinfer.worker.linear.packed_linear import pack_linears
from batchinfer.worker.loader import LoadedModel, check_adapter, load_model
from batchinfer.worker.lora.lora_layers import AdapterLoader
from batchinfer.worker.memory import MemoryPlan, device_memory, fit_memory, model_bytes
from batchinfer.worker.model.body import embedding_size
from batchinfer.worker.model.config import load_config
from batchinfer.worker.model.model_folder import CONFIG_FILES, resolve_folder
from batchinfer.worker.model_runner import ModelRunner
from batchinfer.worker.replay_check import replays_are_right
from batchinfer.worker.sampling.kernel_variants import SamplingVariants
from batchinfer.worker.sampling.logprobs import row_stats
from batchinfer.worker.sampling.sampler import Sampler
from batchinfer.worker.threads.threads import StepThreads, ThreadedRunner
from batchinfer.worker.vision.image_embeddings import EMBEDDING_BYTES, ImageEmbeddings
from batchinfer.worker.vision.support import image_support
from batchinfer.worker.vision.tower import load_vision_tower

_OF_POOLS = (
    *("block_size", "kv_cache_memory", "num_kv_blocks", "kv_cache_dtype", "latent_cache"),
    *("enable_prefix_caching", "preemption", "swap_space"),
)
"""Keys of the job file's section ``engine`` that configure the KV cache."""


def build_engine(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    log: Callable[[str], None],
    pinned_kernels: Mapping[str, str] | None = None,
    tokenizer: Tokenizer | None = None,
    fit_length: bool = False,
    more_adapters: bool = False,
    random_weights: bool = False,
    check_vocab_size: Callable[[int], None] | None = None,
    with_images: bool = False,
) -> EngineContext:
    """Load a model and make its engine.

    Args:
        log: receives lines about threads, kernels and device memory.
        pinned_kernels: ``EngineContext.kernels`` of the runs that this run resumes.
        tokenizer: tokenizer to use; if it is given, the model's own tokenizer is not read.
        fit_length: True to limit sequences to the length that fits in the KV cache.
        more_adapters: True if adapters can be added to the model later.
        random_weights: True if the model's files need not contain weights.
        check_vocab_size: called with the vocabulary size before the weights are loaded; raises a
            JobError if the job does not fit. Not called for encoders, because they generate no
            tokens.
        with_images: True to load the vision tower of a vision-language model.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded or run.
        DeviceError: the device is missing or too small.
    """
    device = choose_device(engine.device)
    if is_run_as_encoder(model):
        if random_weights:
            raise NotYetError("random weights for an encoder or a bidirectional model")
        return build_encoder(model, engine, device, log, pinned_kernels or {}, tokenizer)
    if engine.deterministic and device.type == "cuda" and model.quantization not in (None, "int4"):
        raise ModelError(
            f"engine.deterministic is true, but the CUDA kernels of model.quantization: "
            f"{model.quantization} are not batch-invariant",
            hint="set engine.deterministic: false or engine.device: cpu, set model.quantization to "
            "int4, or remove it",
        )
    if engine.latent_cache and device.type == "cuda" and engine.kv_cache_dtype != "auto":
        raise ModelError(
            f"engine.kv_cache_dtype is {engine.kv_cache_dtype}, but a CUDA device stores latents "
            "in the model's dtype",
            hint="leave kv_cache_dtype out, or set engine.latent_cache: false",
        )
    engine = sized_for(device.type, engine)
    thread_count = set_threads(device, engine, log)
    # Check the model's config before loading the tokenizer, so that a wrong model or job fails
    # early.
    folder = resolve_folder(model.name, model.revision, CONFIG_FILES)
    pretrained = load_config(folder, model.runner)
    if check_vocab_size is not None:
        check_vocab_size(pretrained.get_text_config().vocab_size)
    if tokenizer is None:
        with phase("loading the tokenizer"):
            tokenizer = make_tokenizer(model)
    required = KernelRequirements(engine.cpu_kernels, engine.deterministic, pinned_kernels or {})
    loaded = load_model(
        model,
        device=device,
        kernels=required,
        latent=engine.latent_cache,
        random_weights=random_weights,
    )
    log(str(loaded.kernels))
    for note in loaded.notes:
        log(note)
    for kind in loaded.kernel_names.keys() & {"int8", "int4", "fp8"}:
        log(f"quantized linear layers use {loaded.kernel_names[kind]}")
    layout = loaded.layout(engine.block_size, engine.kv_cache_dtype)
    if engine.deterministic:
        check_batch_invariance(loaded.model, layout, loaded.kernels.kernel)
    tower = None
    if with_images:
        with phase("loading the vision tower"):
            kernel = loaded.kernels.kernel
            tower = load_vision_tower(folder, pretrained, loaded.dtype, device, kernel)
            if tower is not None and kernel is not None:
                pack_linears(tower, kernel, getattr(torch, loaded.dtype))
            if tower is not None and device.type == "cpu":
                replace_activations(tower, getattr(torch, loaded.dtype))
    loaded_bytes = model_bytes(loaded.model) + (0 if tower is None else model_bytes(tower))
    free = device_memory(device, loaded_bytes)
    if tower is not None:
        free = replace(free, free=free.free - EMBEDDING_BYTES)
    memory = fit_memory(
        engine,
        layout,
        loaded.config,
        free,
        weight_bytes=loaded_bytes - loaded.adapter_bytes,
        adapter_bytes=loaded.adapter_bytes,
        max_model_len=loaded.max_model_len,
    )
    for line in memory.lines(loaded.facts["quantization"]):
        log(line)
    if layout.state is not None:
        state_bytes = layout.slots_per_state * layout.bytes_per_block
        log(
            f"recurrent state: {layout.slots_per_state} blocks "
            f"({state_bytes / 2**20:.2f} MiB) for each sequence"
        )
    if any(layout.windows) and engine.preemption != "recompute":
        log(
            "preempted rows are recomputed, because blocks of a model with sliding "
            "windows cannot be swapped yet"
        )
    dtype, host_blocks = getattr(torch, loaded.dtype), memory.num_host_blocks
    with phase("allocating the KV pool"):
        cache = KVCache(layout, memory.num_blocks, device, dtype, host_blocks)
    capture = partial(_graphs, loaded, cache, engine, memory, log)
    graphs = capture(len(loaded.adapters))
    attention = AttentionKernel.of(cache, loaded.kernels.kernel)
    if layout.attention_layers:
        log(attention.line(pinned_kernels or {}))
    embeddings = None
    if tower is not None:
        layers = decoder_layers_of(loaded.model)
        # A GPU is fast only if it embeds several images at once. A CPU embeds images one at a time,
        # so an image's embeddings are bitwise the same, no matter which other images are waiting.
        packs = device.type == "cuda" and not engine.deterministic
        embeddings = ImageEmbeddings(tower, EMBEDDING_BYTES, layers, packs=packs)
    runner = ModelRunner(loaded.model, cache, Sampler(), graphs, loaded.kernels.kernel, embeddings)
    adapters = AdapterLoader(
        loaded.model,
        loaded.pretrained,
        layout,
        numbers=loaded.adapters,
        check=partial(check_adapter, loaded, device.type),
        added=lambda count: runner.recapture(partial(capture, count)),
        kernel=loaded.kernels.kernel,
    )
    threads = None
    if thread_count is not None:
        threads = StepThreads(thread_count, governed=loaded.kernels.is_batch_invariant)
    pool = BlockPool(
        memory.num_blocks,
        engine.block_size,
        enable_prefix_caching=engine.enable_prefix_caching,
        num_host_blocks=host_blocks,
        windows=layout.windows,
        slots_per_state=layout.slots_per_state,
    )
    if fit_length:
        longest = _longest_that_fits(pool, loaded.max_model_len, engine.max_num_batched_tokens)
        loaded = replace(loaded, max_model_len=longest)
    table = SequenceTable(
        engine.max_num_seqs,
        loaded.max_model_len,
        engine.block_size,
        layout.windows,
        layout.slots_per_state,
    )
    policy = PreemptionPolicy()
    if host_blocks:
        policy = PreemptionPolicy(engine.preemption, cache.host.measure())
    logits = partial(torch.zeros, 1, loaded.vocab_size, dtype=dtype, device=device)
    return EngineContext(
        engine=Engine(
            Scheduler(pool, table, engine.max_num_batched_tokens, policy),
            runner if threads is None else ThreadedRunner(runner, threads),
            # On a CPU, submitting a step computes it, so the scheduler cannot run ahead.
            runs_ahead=device.type == "cuda",
            vocab_size=loaded.vocab_size,
        ),
        tokenizer=tokenizer,
        **pool_fields(loaded, layout, memory) | {"adapters": adapters.numbers},
        embedding_size=partial(embedding_size, loaded.model),
        images=None if tower is None else image_support(folder, pretrained),
        load_adapter=adapters.load if more_adapters else None,
        warm_up=_SamplingKernels(logits) if cache.pool.is_cuda else None,
        device=describe(device),
        model_facts=loaded.facts,
        kernels={**loaded.kernel_names, ATTENTION: attention.name},
        device_bytes=runner.device_bytes,
    )


def _longest_that_fits(pool: BlockPool, most: int, step_tokens: int) -> int:
    """Return the length, at most ``most``, of the longest sequence that fits in the KV cache, if a
    step computes at most ``step_tokens`` tokens."""

    def slots(length: int) -> int:  # the last token is never fed back, so it needs no KV
        blocks = pool.window_slots.most_slots(length - 1, min(length - 1, step_tokens))
        return blocks + pool.states.slots_per_state

    return bisect_right(range(2, most + 1), pool.num_blocks, key=slots) + 1


def _graphs(
    loaded: LoadedModel,
    cache: KVCache,
    engine: EngineConfig,
    memory: MemoryPlan,
    log: Callable[[str], None],
    num_adapters: int,
) -> StepGraphs | None:
    """Capture CUDA graphs for steps of every size; return None on other devices."""
    if not cache.pool.is_cuda:
        return None
    graphs = StepGraphs(
        loaded.model,
        cache,
        max_num_seqs=engine.max_num_seqs,
        max_graph_tokens=memory.max_graph_tokens,
        max_model_len=loaded.max_model_len,
        num_adapters=num_adapters,
        kernel=loaded.kernels.kernel,
    )
    with phase("capturing CUDA graphs", len(graphs.sizes)) as capturing:
        graphs.capture_all(log, captured=lambda: capturing.advance(1))
    is_right = replays_are_right(loaded.model, cache, graphs, loaded.kernels.kernel, log)
    return graphs if is_right else None


class _SamplingKernels:
    """A ``WarmUp`` that remembers which kernels are compiled and does not compile them again.

    Args:
        logits: returns logits of one row, [1, vocabulary size].
    """

    def __init__(self, logits: Callable[[], torch.Tensor]) -> None:
        self._logits = logits
        self._compiled = set[SamplingVariants]()

    def __call__(
        self,
        params: Iterable[SamplingParams],
        *,
        own: Collection[str] = (),
        forced_tokens: bool = False,
    ) -> None:
        logits = self._logits()
        variants = SamplingVariants.of(
            params, logits.shape[1], own=own, forced_tokens=forced_tokens
        )
        if variants in self._compiled:
            return
        with phase("compiling sampling kernels"):
            for batch in variants.batches():
                Sampler()(logits, batch).result()
            if variants.scores:
                row_stats(logits, len(logits))
        self._compiled.add(variants)


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
