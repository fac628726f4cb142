"""Derives a model's parameter counts, weight bytes and KV bytes from its config."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.kv.model_config import EXPERTS_PER_TOKEN, Config, text_config
from batchinfer.engine.simulate.expert_layers import num_dense_layers, num_expert_layers

_SHARED_WIDTHS = (
    *("shared_expert_intermediate_size", "shared_intermediate_size"),
    "moe_shared_expert_intermediate_size",
)
_DENSE_WIDTHS = (
    *("intermediate_size_mlp", "prefix_dense_intermediate_size", "dense_intermediate_size"),
    *("intermediate_size", "n_inner"),
)
"""Config keys for the width of a dense MLP. Where one of the first three is set,
``intermediate_size`` is the width of an expert."""
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
"""Config keys for the number of shared experts. ``_SHARED_WIDTHS`` are keys for the width of all
shared experts together."""
_WITHOUT_MLP = frozenset({"falcon_mamba", "mamba", "mamba2"})
"""Values of ``model_type`` of models whose layers have no MLP, only a recurrent part."""
_UNGATED_MLP = frozenset(
    [
        *("falcon", "gpt2", "gpt_bigcode", "gpt_neox", "nemotron", "opt", "phi", "starcoder2"),
        "nemotron_h",
        *("bert", "camembert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta"),
    ]
)
"""Values of ``model_type`` of models whose MLPs have two matrices. A gated MLP has three."""
OWN_INTEGERS = ("int8", "int4")
"""Values of ``model.quantization`` that store the output head as int8 on a CPU."""
INT8_BYTES = 1.0
_INT4_BYTES = 0.5
_SCALE_AND_ZERO = 5  # bytes per group: a float32 scale and an 8-bit zero point
_GROUP_STEP = 8  # a checkpoint's group size is used if it is a multiple of this number
_OWN_GROUP = 64
"""Group size of batchinfer's 4-bit quantization, and an estimate for torchao's, whose groups have
32, 64 or 128 weights."""
_MXFP4_GROUP = 32
_NVFP4_GROUP = 16
_NVFP4_BYTES = _INT4_BYTES + 1 / _NVFP4_GROUP
"""Bytes per weight of NVFP4: 16 numbers share a float8 scale."""
_CUDA_GROUPS = (16, 32, 64)
_MOST_CUDA_GROUP = 128
"""The CUDA kernel repeats the scales of longer groups, whose size must be a multiple of this."""
_NVFP4_NAMES = ("NVFP4", "W4A16_NVFP4")
_FLOAT8_BLOCK = 128
_FLOAT8_SCALE = 4  # bytes
_BITSANDBYTES_GROUP = 64  # bitsandbytes' default; config.json does not contain the size


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Sizes of a model that determine the cost of a token.

    If layers differ in the shape of their KV, numbers per layer are means over all layers.
    """

    layers: int
    hidden: int
    heads: int
    attention_width: float
    """Elements of a head's key and value together."""
    attention_parameters: float
    """Parameters of a layer's attention matrices."""
    mlp_parameters: int
    """Parameters of a layer's dense MLP."""
    dense_layers: int
    experts: int
    """Experts per layer with experts; 0 if all layers are dense."""
    experts_per_token: int
    head_parameters: int
    tied: bool
    """True if the embedding and the head share a matrix."""
    activations: float
    """Elements read and written between the matrices, per token and layer."""
    element_bytes: int
    matrix_bytes: float
    """Bytes per parameter of the layers' matrices, except experts."""
    expert_bytes: float
    """Bytes per parameter of the experts."""
    head_bytes: float
    """Bytes per parameter of the head."""
    kv_bytes: int
    """Bytes of a token's KV in all layers."""
    state_bytes: int = 0
    """Bytes of a sequence's recurrent state in all layers."""
    expert_layers: int = 0
    expert_parameters: int = 0
    """Parameters of one expert."""
    shared_parameters: int = 0
    """Parameters of a layer's shared experts, which every token uses."""

    @classmethod
    def from_config(
        cls,
        config: Config,
        dtype: str,
        kv_cache_dtype: str = "auto",
        quantization: str | None = None,
        *,
        latent: bool = False,
        on_cpu: bool = False,
    ) -> ModelCost:
        """Read the sizes from a config (``config.to_dict()`` or config.json).

        Args:
            kv_cache_dtype: as in ``KVLayout.from_config``.
            latent: as in ``KVLayout.from_config``.

        Raises:
            ValueError: ``KVLayout.from_config`` refuses the config.
        """
        text = text_config(config)
        layout = KVLayout.from_config(
            config,
            block_size=1,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            latent=latent,
        )
        hidden = _first(text, "hidden_size", "n_embd", "d_model")
        heads = _first(text, "num_attention_heads", "n_head", "num_heads", "n_heads")
        experts = _first(text, "num_experts", "num_local_experts", "n_routed_experts")
        inner = _first(text, *_DENSE_WIDTHS) or 4 * hidden
        if text.get("model_type") in _WITHOUT_MLP:
            inner = 0
        expert_layers = num_expert_layers(text, layout.num_layers) if experts else 0
        expert = shared = 0
        latent_width = _first(text, "moe_latent_size")
        if experts:
            expert = _first(text, "moe_intermediate_size", "intermediate_size") or inner
            shared = _first(text, *_SHARED_WIDTHS) or expert * _first(text, *_NUM_SHARED)
        attending, state = layout.attention_layers, layout.state
        shapes = [layout.shape(layer) for layer in attending]
        width = _mean(shape.key_width + shape.value_width for shape in shapes)
        queries = heads * _mean(shape.key_width for shape in shapes)
        keys = sum(layout.stored_elements) / max(len(attending), 1)
        attention_share = len(attending) / layout.num_layers
        recurrent_share = len(state.layers) / layout.num_layers if state else 0.0
        attention = _latent_parameters(text, hidden, heads) or hidden * (heads * width + keys)
        recurrent = hidden * state.shape.num_projected if state else 0
        matrices = 2 if text.get("model_type") in _UNGATED_MLP else 3
        return cls(
            layers=layout.num_layers,
            hidden=hidden,
            heads=heads,
            attention_width=width * attention_share,
            attention_parameters=attention * attention_share + recurrent * recurrent_share,
            mlp_parameters=matrices * hidden * inner,
            dense_layers=num_dense_layers(text, layout.num_layers, expert_layers),
            experts=experts,
            experts_per_token=_first(text, *EXPERTS_PER_TOKEN),
            head_parameters=int(text["vocab_size"]) * hidden,
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            # Counts two norms with residuals, q, k and v (written, rotated, read), and a gated MLP.
            activations=10 * hidden + 6 * queries + 3 * keys + 6 * (expert or inner),
            element_bytes=layout.element_bytes,
            matrix_bytes=matrix_bytes(config, quantization, layout.element_bytes, on_cpu=on_cpu),
            expert_bytes=matrix_bytes(
                config, quantization, layout.element_bytes, on_cpu=on_cpu, experts=True
            ),
            head_bytes=INT8_BYTES
            if on_cpu and quantization in OWN_INTEGERS
            else float(layout.element_bytes),
            kv_bytes=layout.bytes_per_token,
            state_bytes=state.num_bytes if state else 0,
            expert_layers=expert_layers,
            expert_parameters=matrices * (latent_width or hidden) * expert,
            shared_parameters=matrices * hidden * shared + 2 * hidden * latent_width,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights except norms and biases."""
        each = self.element_bytes if self.tied else self.element_bytes + self.head_bytes
        heads = self.head_parameters * each
        return round(self._layers_bytes(self.experts) + heads)

    @property
    def active_parameters(self) -> float:
        """Number of parameters of all layers that one token uses."""
        experts = self.expert_parameters * self.experts_per_token + self.shared_parameters
        dense = self.dense_layers * self.mlp_parameters
        return self.layers * self.attention_parameters + self.expert_layers * experts + dense

    def weights_read(self, tokens: int) -> float:
        """Return the bytes of the layers' matrices that a step of ``tokens`` tokens reads.

        Assumes that the router chooses experts evenly and independently.
        """
        touched = 0.0
        if self.experts:
            untouched = (1 - self.experts_per_token / self.experts) ** tokens
            touched = self.experts * (1 - untouched)
        return self._layers_bytes(touched)

    def _layers_bytes(self, experts: float) -> float:
        """Return the bytes of all layers' matrices, counting ``experts`` experts per layer."""
        dense = self.dense_layers * self.mlp_parameters
        others = self.layers * self.attention_parameters + dense
        others += self.expert_layers * self.shared_parameters
        routed = self.expert_layers * self.expert_parameters * experts
        return others * self.matrix_bytes + routed * self.expert_bytes


def encoder_cost(config: Config, dtype: str) -> ModelCost:
    """Read the sizes of an encoder, which has no KV, from its config (``config.to_dict()``)."""
    text = text_config(config)

    def size(*names: str) -> int:
        return next((int(text[name]) for name in names if text.get(name)), 0)

    hidden, heads = size("hidden_size", "dim"), size("num_attention_heads", "n_heads")
    inner = size("intermediate_size", "hidden_dim")
    head_dim = size("head_dim") or hidden // heads
    queries, keys = heads * head_dim, (size("num_key_value_heads") or heads) * head_dim
    matrices = 2 if text.get("model_type") in _UNGATED_MLP else 3
    element_bytes = 4 if dtype == "float32" else 2
    layers = size("num_hidden_layers", "n_layers")
    return ModelCost(
        layers=layers,
        hidden=hidden,
        heads=heads,
        attention_width=2 * head_dim,
        attention_parameters=2 * hidden * (queries + keys),
        mlp_parameters=matrices * hidden * inner,
        dense_layers=layers,
        experts=0,
        experts_per_token=0,
        # Count only the embedding, because an encoder computes no logits.
        head_parameters=size("vocab_size") * hidden,
        tied=True,
        activations=10 * hidden + 4 * queries + 4 * keys + 2 * matrices * inner,
        element_bytes=element_bytes,
        matrix_bytes=float(element_bytes),
        expert_bytes=float(element_bytes),
        head_bytes=float(element_bytes),
        kv_bytes=0,
    )


def matrix_bytes(
    config: Mapping[str, Any],
    quantization: str | None,
    element_bytes: int,
    *,
    on_cpu: bool = False,
    experts: bool = False,
) -> float:
    """Return the bytes per parameter of linear layers, including scales.

    Weights that torchao quantized stay quantized. Other quantized weights are dequantized when they
    are loaded, unless ``quantization`` keeps them.

    Args:
        element_bytes: bytes per element of the dtype that the model computes in.
        experts: true for the experts of an MoE layer, false for the other linear layers.
    """
    saved = config.get("quantization_config") or text_config(config).get("quantization_config")
    saved = saved or {}
    if quantization == "fp8" and on_cpu:
        block = saved.get("weight_block_size")
        group = block[1] if isinstance(block, list) and len(block) == 2 else _FLOAT8_BLOCK
        return INT8_BYTES + _FLOAT8_SCALE / group
    if quantization == "int4" and not on_cpu and not experts:
        return _cuda_int4_bytes(saved, element_bytes)
    if quantization in OWN_INTEGERS and on_cpu:
        if _is_nvfp4(saved) and (experts or quantization == "int4"):
            return _NVFP4_BYTES
        is_mxfp4 = experts and saved.get("quant_method") == "mxfp4"
        group4 = _MXFP4_GROUP if is_mxfp4 else _saved_group(saved, 4)
        if quantization == "int4" or (experts and group4 is not None):
            return _INT4_BYTES + _SCALE_AND_ZERO / (group4 or _OWN_GROUP)
        return INT8_BYTES + _SCALE_AND_ZERO / (_saved_group(saved, 8) or math.inf)
    if experts:
        return float(element_bytes)  # only the C kernels quantize experts
    if quantization == "int4_weight_only":
        return _INT4_BYTES + 2 * element_bytes / _OWN_GROUP
    if quantization is not None or saved.get("quant_method") == "torchao":
        return INT8_BYTES  # codes with fewer bits also take a byte each
    return float(element_bytes)


def _cuda_int4_bytes(saved: Mapping[str, Any], element_bytes: int) -> float:
    """Return the bytes per parameter of a linear layer with 4 bits on a CUDA device."""
    if _is_nvfp4(saved):
        return _INT4_BYTES + element_bytes / _NVFP4_GROUP  # scales have the model's dtype
    if _is_packed_mxfp4(saved):
        return _INT4_BYTES + element_bytes / _MXFP4_GROUP
    group = _saved_group(saved, 4) or _OWN_GROUP
    is_kept = group in _CUDA_GROUPS or group == math.inf or group % _MOST_CUDA_GROUP == 0
    return _INT4_BYTES + _SCALE_AND_ZERO / min(group if is_kept else _OWN_GROUP, _MOST_CUDA_GROUP)


def _is_nvfp4(saved: Mapping[str, Any]) -> bool:
    """Return true if a checkpoint has NVFP4 weights. If it also has other formats, only its experts
    are in NVFP4."""
    if saved.get("quant_method") == "modelopt":
        layers = saved.get("quantized_layers") or {}
        names = (saved.get("quant_algo"), *(each.get("quant_algo") for each in layers.values()))
        return any(name in _NVFP4_NAMES for name in names)
    return any(
        _is_float4(weights) and weights.get("group_size") != _MXFP4_GROUP
        for weights in _compressed_weights(saved)
    )


def _is_packed_mxfp4(saved: Mapping[str, Any]) -> bool:
    """Return true if a checkpoint of compressed-tensors has weights in MXFP4."""
    return any(
        _is_float4(weights) and weights.get("group_size") == _MXFP4_GROUP
        for weights in _compressed_weights(saved)
    )


def _is_float4(weights: Mapping[str, Any]) -> bool:
    return weights.get("type") == "float" and weights.get("num_bits") == 4


def _saved_group(saved: Mapping[str, Any], bits: int) -> float | None:
    """Return the group size of a checkpoint's integers or MXFP4 numbers; infinite if a matrix row
    is one group.

    Returns None if the checkpoint has no codes with this number of bits, or if batchinfer quantizes
    the weights again.
    """
    if saved.get("quant_method") == "bitsandbytes":
        return _BITSANDBYTES_GROUP if bits == 4 and saved.get("load_in_4bit") else None
    if bits == 4 and _is_packed_mxfp4(saved):
        return _MXFP4_GROUP
    for part in _integer_parts(saved):
        if part.get("bits", part.get("num_bits", part.get("w_bit"))) == bits:
            size = part.get("group_size")
            if size in (None, -1):
                return math.inf
            return size if type(size) is int and size % _GROUP_STEP == 0 else None
    return None


def _integer_parts(saved: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a quantization config that describe integer weights."""
    if saved.get("quant_method") in ("awq", "gptq"):
        yield saved
    yield from (each for each in _compressed_weights(saved) if each.get("type", "int") == "int")


def _compressed_weights(saved: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the descriptions of weights in compressed-tensors' groups of layers."""
    if saved.get("quant_method") == "compressed-tensors":
        for group in (saved.get("config_groups") or {}).values():
            yield group.get("weights") or {}


def _mean(numbers: Iterable[float]) -> float:
    numbers = list(numbers)
    return sum(numbers) / max(len(numbers), 1)


def _latent_parameters(config: Config, hidden: int, heads: int) -> int:
    """Count the parameters of a layer's latent attention (DeepSeek-V2, arXiv:2405.04434)."""
    rank, query_rank = _first(config, "kv_lora_rank"), _first(config, "q_lora_rank")
    if not rank:
        return 0
    rotary, value = _first(config, "qk_rope_head_dim"), _first(config, "v_head_dim")
    key = _first(config, "qk_nope_head_dim")
    queries = heads * (key + rotary)
    query = query_rank * (hidden + queries) if query_rank else hidden * queries
    latent = hidden * (rank + rotary) + rank * heads * (key + value)
    return query + latent + heads * value * hidden


def _first(config: Config, *names: str) -> int:
    """Return the config's first nonzero value under ``names``, or 0; the mean if it is a list."""
    value = next((config[name] for name in names if config.get(name)), 0)
    return int(_mean(value) if isinstance(value, list | tuple) else value)
