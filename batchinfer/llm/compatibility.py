"""Handles arguments and methods of vLLM that this package does not have.

An argument without effect causes a warning that names it. An unsupported argument is refused unless
it has its default. An argument that has another name in this package is refused, with that name in
the message.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from batchinfer.console.format import did_you_mean
from batchinfer.errors import NotYetError

_NO_EFFECT = """
additional_config aggregate_engine_logging all2all_backend allow_deprecated_quantization
async_scheduling attention_backend attention_config aux_output_config cache_salt
chat_template_content_format code_revision collect_detailed_traces compilation_config
compilation_level concurrency_limit cp_kv_cache_interleave_size cuda_graph_sizes
cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets disable_async_output_proc
disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce
disable_hybrid_kv_cache_manager disable_log_requests disable_log_stats disable_mm_preprocessor_cache
disable_nccl_for_dp_synchronization distributed_executor_backend distributed_timeout_seconds
download_dir dp_sync_interval enable_batch_sharded_sampling enable_chunked_prefill
enable_cumem_allocator enable_dbo enable_ep_weight_filter enable_eplb enable_fault_tolerance
enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing enable_log_requests
enable_logging_iteration_details enable_mamba_cache_stochastic_rounding
enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mixed_moe_lora_format
enable_mm_processor_stats enable_moe_shared_loras enable_multimodal_encoder_data_parallel
enable_nccl_comm_suspend enable_shm_tensor_arena enable_sleep_mode enable_tower_connector_lora
enforce_eager engram_config expert_placement_strategy fail_on_environ_validation
fault_tolerance_config fully_sharded_loras gdn_prefill_backend guided_decoding_backend
guided_decoding_disable_fallback ignore_patterns interleave_mm_strings ir_op_priority
kda_decode_backend kda_prefill_backend kernel_config kv_cache_metrics kv_cache_metrics_sample
kv_events_config kv_offloading_backend kv_sharing_fast_prefill language_model_only
limit_mm_per_prompt linear_backend log_config_file log_level logging_config logits_processor_pattern
long_prefill_token_threshold lora_extra_vocab_size lora_target_modules max_cpu_loras
max_cudagraph_capture_size max_long_partial_prefills max_lora_cls_labels max_lora_rank max_loras
max_num_active_seqs max_num_partial_prefills max_num_queued_reqs max_num_queued_tokens
max_num_scheduled_tokens max_parallel_loading_workers max_seq_len_to_capture media_io_kwargs
model_loader_extra_config moe_backend monokernel multi_step_stream_outputs num_redundant_experts
num_scheduler_steps optimization_level otlp_traces_endpoint per_request_spec_decode_metrics
performance_mode prefill_schedule_interval prefix_cache_retention_interval prefix_caching_hash_algo
prefix_match_unit priority profiler_config pt_load_map_location ray_workers_use_nsight
renderer_num_workers scheduler_reserve_full_isl scheduling_policy served_model_name
show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling skip_reading_prefix_cache
spaces_between_special_tokens sparse_indexer_topk_backend spec_method spec_model spec_tokens
specialize_active_lora speculative_config stream_interval structured_outputs_backend
structured_outputs_disable_fallback structured_outputs_enable_in_reasoning swa_bounded_replay
tokenizer_pool_size ubatch_size use_fp64_gumbel use_replayssm use_tqdm_on_load use_v2_block_manager
watchdog_config watermark worker_cls worker_extension_cls worker_use_ray
"""
NO_EFFECT = frozenset(_NO_EFFECT.split())
"""Arguments that have no effect, because the engine lacks the feature or offers no choice."""

_PREFIXES = """
cpu_distributed_ data_parallel_ dbo_ dcp_ ec_manager_ elastic_ep_ eplb_ jit_monitor_
long_prefill_token_threshold_ mamba_ master_ mm_ node_rank numa_bind offload_ replayssm_
safetensors_ sleep_ video_pruning_
"""
NO_EFFECT_PREFIXES = tuple(_PREFIXES.split())
"""Prefixes of the names of other arguments that have no effect."""

ONLY_VALUES: Mapping[str, tuple[object, ...]] = {
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "load_format": ("auto", "safetensors", "hf", "fastsafetensors", "runai_streamer"),
    "lora_dtype": ("auto",),
    "model_impl": ("auto", "transformers"),
    "tokenizer_mode": ("auto", "hf", "slow"),
    "trust_remote_code": (True,),
}
"""Values that some arguments accept without effect; other values are not supported yet."""

_AUTO = """
config_format convert guided_decoding_backend linear_backend load_format lora_dtype
mamba_cache_dtype mamba_ssm_cache_dtype mm_processor_device model_impl moe_backend offload_backend
sparse_indexer_topk_backend structured_outputs_backend tokenizer_mode worker_cls
"""
_UNSET = """
disable_cascade_attn disable_hybrid_kv_cache_manager disable_nccl_for_dp_synchronization
enable_batch_sharded_sampling enable_chunked_prefill enable_flashinfer_autotune
"""
DEFAULTS: Mapping[str, object] = {
    **dict.fromkeys(_AUTO.split(), "auto"),
    **dict.fromkeys(_UNSET.split()),
    "all2all_backend": "allgather_reducescatter",
    "data_parallel_backend": "mp",
    "dbo_decode_token_threshold": 32,
    "dbo_prefill_token_threshold": 512,
    "dcp_kv_cache_interleave_size": 1,
    "disable_log_stats": True,
    "dp_sync_interval": 16,
    "expert_placement_strategy": "linear",
    "jit_monitor_mode": "warn",
    "kv_cache_metrics_sample": 0.01,
    "kv_offloading_backend": "native",
    "mamba_cache_mode": "none",
    "master_addr": "127.0.0.1",
    "master_port": 29501,
    "max_lora_rank": 16,
    "max_loras": 1,
    "mm_device_do_normalize": True,
    "mm_encoder_fp8_scale_save_margin": 1.5,
    "mm_encoder_tp_mode": "weights",
    "mm_hasher_algorithm": "blake3",
    "mm_processor_cache_gb": 4,
    "mm_processor_cache_type": "lru",
    "mm_shm_cache_max_object_size_mb": 128,
    "mm_tensor_ipc": "direct_rpc",
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
    "per_request_spec_decode_metrics": "none",
    "performance_mode": "balanced",
    "prefill_schedule_interval": 1,
    "prefix_caching_hash_algo": "sha256",
    "pt_load_map_location": "cpu",
    "renderer_num_workers": 1,
    "replayssm_buffer_len": 16,
    "scheduler_reserve_full_isl": True,
    "scheduling_policy": "fcfs",
    "spaces_between_special_tokens": True,
    "stream_interval": 1,
    "swa_bounded_replay": True,
    "use_tqdm_on_load": True,
    "video_pruning_method": "evs",
}
"""vLLM's defaults of arguments without effect, from ``EngineArgs`` and ``LLM`` of vLLM 0.32.0. All
other arguments without effect have the default None, or a false value such as 0 or {}."""

_NOT_YET = """
allowed_local_media_path allowed_media_domains calculate_kv_scales cpu_offload_gb cpu_offload_params
default_mm_loras diffusion_config disable_sliding_window ec_transfer_config enable_elastic_ep
enable_expert_parallel enable_mm_embeds enable_return_routed_experts enable_trace_replay
guided_decoding_disable_additional_properties guided_options_request hf_config_path
io_processor_plugin kv_cache_dtype_skip_layers kv_transfer_config lora_modules mm_processor_kwargs
model_class_overrides model_weights multi_modal_uuids num_lookahead_slots offload_group_size
override_attention_dtype override_pooler_config pooler_config preset prompt_adapter_request
qlora_adapter_name_or_path quantization_config reasoning_parser_plugin return_sampling_mask
rope_scaling rope_theta scheduler_cls token_type_ids tokens_only watermark_config watermarking
weight_transfer_config
"""
_SIZES = """
data_parallel_size decode_context_parallel_size nnodes pipeline_parallel_size
prefill_context_parallel_size
"""
NOT_YET: Mapping[str, int] = {
    **dict.fromkeys(_NOT_YET.split(), 0),
    **dict.fromkeys(_SIZES.split(), 1),
}
"""Unsupported arguments with their default values; the default and None are accepted."""

ELSEWHERE: Mapping[str, str] = {
    "device_ids": "set the environment variable CUDA_VISIBLE_DEVICES",
    "hf_token": "set the environment variable HF_TOKEN",
    "kv_offloading_size": "give swap_space, like 8GiB",
    "logits_processors": "give SamplingParams(logits_processors=[function])",
    "prompt_embeds": "give {'prompt_embeds': tensor} as a prompt",
    "prompt_token_ids": "give the token ids as prompts",
    "reasoning_config": "give reasoning={'start': ..., 'end': ...}",
    "tokenization_kwargs": "give SamplingParams(truncate_prompt_tokens=...), or token ids",
    "tokenizer_revision": "give the tokenizer's folder as tokenizer",
}
"""Refused arguments, with their alternatives."""

_NO_MISTRAL = (
    "leave it out to use tokenizer.json and the chat template in the model's "
    "folder; if they are missing, give tokenizer=... with a folder that has them, "
    "because tekken.json and mistral_common's templates are not supported"
)

METHODS: Mapping[str, str] = {
    "collective_rpc": "an LLM has one process, and no workers to call",
    "enqueue": "give all prompts in one call to generate",
    "set_tokenizer": "give LLM(tokenizer=...)",
    "sleep": "delete the LLM, which frees its memory, and create it again",
    "start_profile": "call LLM.report(), which shows where time and memory went",
    "update_weights": "save the weights, and create the LLM again",
    "wake_up": "an LLM does not sleep; delete it, and create it again",
}
"""Missing methods and attributes of vLLM's ``LLM``, with their alternatives."""


def _is_default(name: str, value: object) -> bool:
    if name in DEFAULTS:
        return value == DEFAULTS[name]
    return isinstance(value, int | float | str | list | set | Mapping) and not value


def settle(
    call: str, given: Mapping[str, object], known: Sequence[str], *, stacklevel: int = 3
) -> None:
    """Warn once about the arguments without effect, and refuse unsupported arguments.

    An argument with vLLM's default gives no warning.

    Args:
        call: name of the call in messages.
        given: arguments by name; None means that the argument is missing.
        known: names to suggest for a misspelled name.
        stacklevel: stack level of the warning; 3 means the line that called this function's caller.

    Raises:
        NotYetError: an argument or its value is not supported yet.
        TypeError: an argument is unknown, or has another name in this package.
        ValueError: a value has an alternative in this package.
    """
    ignored = []
    for name, value in given.items():
        if name in NOT_YET:
            is_number = isinstance(value, int | float)
            is_default = value == NOT_YET[name] if is_number else _is_default(name, value)
            if value is not None and not is_default:
                raise NotYetError(f"{call}({name}=...)")
        elif name in ELSEWHERE:
            if value is not None and value is not False:
                raise TypeError(f"{call} has no argument {name}; {ELSEWHERE[name]}")
        elif name in ONLY_VALUES or name in NO_EFFECT or name.startswith(NO_EFFECT_PREFIXES):
            if value is None or _is_default(name, value):
                continue
            if name == "tokenizer_mode" and value == "mistral":
                raise ValueError(f"{call}({name}={value!r}) is not supported; {_NO_MISTRAL}")
            if name in ONLY_VALUES and value not in ONLY_VALUES[name]:
                raise NotYetError(f"{call}({name}={value!r})")
            ignored.append(name)
        else:
            raise TypeError(f"{call} has no argument {name}{did_you_mean(name, known)}")
    if ignored:
        has = "has" if len(ignored) == 1 else "have"
        warnings.warn(
            f"{call}: {', '.join(ignored)} {has} no effect in batchinfer", stacklevel=stacklevel
        )
