"""Replaces a model's attention, MLPs and norms with fused modules that compute the same results.

A module is a candidate if its submodules have the expected names. To record the candidates' inputs,
the model runs once on four tokens, whose positions range from the model's first to its last. Each
candidate is copied to float32, so that rounding does not hide differences. The fused module must
give the same results as the copy for the recorded input, and for the input scaled down and scaled
up (far enough to show clipping). A candidate with different results is not replaced, so an unknown
family runs as in transformers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.errors import one_line
from batchinfer.kernels.rotary_pairs import RotaryPairs
from batchinfer.kernels.route import Routing
from batchinfer.worker.attention.variant import AttentionVariant
from batchinfer.worker.fusion.fused_modules import (
    LOGITS_TOLERANCE,
    FusedAttention,
    FusedDecoderLayer,
    FusedGatedMLP,
    FusedRMSNorm,
    fuse_layers,
    fused_layer,
    has_layer_parts,
)
from batchinfer.worker.fusion.gated_delta_net import FusedGatedDeltaNet
from batchinfer.worker.fusion.mixture import (
    FusedMixture,
    MixtureParts,
    chooses_alike,
    float32_copy,
    routings,
)
from batchinfer.worker.model.quantization import is_plain
from batchinfer.worker.self_test import AttentionRecorder, ModuleCall, Probe, record_calls, verify

_TOKENS = (3, 7, 5, 3)
_NORM_OFFSETS = (0.0, 1.0)  # Gemma's norms multiply by 1 + weight
_ATTENTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"}
_MLPS = {"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}
"""Names of the linear layers of attention and of gated MLPs, separate or merged as in Phi-3."""
_PAIRS = (
    RotaryPairs(),
    RotaryPairs(adjacent=True),
    RotaryPairs(adjacent=True, by_pair=True),
    RotaryPairs(by_pair=True, halves=True),
)
"""Ways of rotating heads, most frequent first. On a CPU, the kernels support only the first."""
_SCALES = (2.0**-8, 1.0, 2.0**8, 2.0**16)
_MODERATE = 1.0
"""Largest scale at which attention's outputs are compared. Larger inputs saturate the softmax, so
that rounding errors decide which key gets all the weight."""
_TOLERANCE = 2e-5

_Factory = Callable[[Any, AttentionVariant | None], nn.Module]
"""Makes a fused module from transformers' module and, for attention, its ``AttentionVariant``."""


def fuse(
    model: nn.Module,
    layout: KVLayout,
    max_model_len: int,
    log: Callable[[str], None] = lambda line: None,
) -> bool:
    """Replace a model's modules with fused modules, one after another, and then its layers.

    Args:
        layout: KV layout of a pool for the model.
        max_model_len: longest sequence in tokens; positions are tested up to this length.
        log: receives a line for each kind of module whose fused module raises an error, for example
            because the device cannot run its kernel.

    Returns:
        True if the model's logits stayed the same; if False, the model must be loaded again.
    """
    with torch.inference_mode():
        modules = _ModuleFusion(model, layout, max_model_len)
        modules.fuse_children(model)
        if modules.layers_add_plainly():
            fuse_layers(model, layout)
        for kind, reason in modules.errors.items():
            log(f"{kind} modules are not fused, because the fused module failed: {reason}")
        tolerance = LOGITS_TOLERANCE[next(model.parameters()).dtype]
        return verify(modules.logits_before, modules.logits(), tolerance)


class _ModuleFusion:
    def __init__(self, model: nn.Module, layout: KVLayout, max_model_len: int) -> None:
        assert layout.block_size >= len(_TOKENS)
        positions = (0, 1, max_model_len // 2, max_model_len - 1)
        probe = Probe(model, layout, _TOKENS, positions=positions)
        self.logits = probe.logits
        self._float32 = Probe(model, layout, _TOKENS, positions=positions, dtype=torch.float32)
        attention = AttentionRecorder(probe.backend)
        recorded = [m for m in model.modules() if _factories(m) or has_layer_parts(m)]
        for module in model.modules():
            if parts := MixtureParts.of(module):
                recorded += [module, parts.router]
        with record_calls(recorded) as calls:
            self.logits_before = probe.logits(attention)
        self._calls = {call.module: call for call in calls}
        self._variants = {call.layer: call.variant for call in attention.calls}
        self.errors: dict[str, str] = {}
        """The first error of a fused module, keyed by the class of the replaced module."""

    def fuse_children(self, parent: nn.Module) -> None:
        """Replace modules inside ``parent``. An outer module is tried before its children, because
        its fused module replaces the children too."""
        for name, child in list(parent.named_children()):
            fused = self._fused(child)
            if fused is None:
                self.fuse_children(child)
            else:
                setattr(parent, name, fused)

    def _fused(self, module: nn.Module) -> nn.Module | None:
        """Return a fused module that gives the same results as ``module``, or None."""
        call, mixture = self._calls.get(module), self._mixture_factories(module)
        factories = mixture or _factories(module)
        if call is None or not factories:
            return None
        dtypes = {tensor.dtype for tensor in (*module.parameters(), *_float_tensors(call))}
        if len(dtypes) > 1 and not mixture:
            return None  # part of the module is kept in another dtype
        variant = self._variants.get(getattr(module, "layer_idx", -1))
        original, failed = float32_copy(module), None
        for make_fused in factories:
            try:
                candidate = make_fused(original, variant)
                same = all(self._agree(original, candidate, call, scale) for scale in _SCALES)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # for example, if the call has unexpected arguments
                failed = failed or error
                continue
            if same:
                return make_fused(module, variant)
        if failed is not None:
            self._note(module, failed)
        return None

    def _mixture_factories(self, module: Any) -> list[_Factory]:
        """Return factories for a mixture of experts whose router returns its logits first."""
        parts, call = MixtureParts.of(module), self._calls.get(module)
        routed = None if parts is None else self._calls.get(parts.router)
        if parts is None or call is None or routed is None or not isinstance(routed.output, tuple):
            return []
        dtype, returns_pair = routed.output[0].dtype, isinstance(call.output, tuple)

        def factory(routing: Routing) -> _Factory:
            return lambda mixture, _: FusedMixture(
                mixture, routing, logits_dtype=dtype, returns_pair=returns_pair
            )

        return [factory(routing) for routing in routings(module, parts)]

    def layers_add_plainly(self) -> bool:
        """Return True if layers that add in place give the same results as the model's decoder
        layers. One decoder layer of each kind is compared in float32. In 16 bits, the logits would
        not reveal a layer that scales its additions to the residual."""
        layers = {
            (type(layer), type(layer.mlp)): layer for layer in self._calls if fused_layer(layer)
        }
        for layer in layers.values():
            original = float32_copy(layer)
            candidate = fused_layer(original)
            assert candidate is not None
            try:
                if not self._agree(original, candidate, self._calls[layer], 1.0):
                    return False
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # for example, if the call has unexpected arguments
                self._note(layer, error)
                return False
        return True

    def _note(self, module: nn.Module, error: Exception) -> None:
        self.errors.setdefault(type(module).__name__, f"{type(error).__name__}: {one_line(error)}")

    def _agree(
        self, original: nn.Module, candidate: nn.Module, call: ModuleCall, scale: float
    ) -> bool:
        if isinstance(candidate, FusedMixture) and scale == 1.0:
            arguments, _ = _scaled(call, scale)
            if not chooses_alike(original, candidate, arguments[0], _TOLERANCE):
                return False
        before, after = (self._results(module, call, scale) for module in (original, candidate))
        return len(before) == len(after) and all(
            verify(*results, _TOLERANCE) for results in zip(before, after, strict=True)
        )

    def _results(self, module: nn.Module, call: ModuleCall, scale: float) -> list[torch.Tensor]:
        """Run a float32 module on the scaled input of a call. Return its output and, for attention,
        also its queries, keys and values."""
        arguments, options = _scaled(call, scale)
        attention = AttentionRecorder(self._float32.backend)
        with self._float32.in_forward(attention):
            output = module(*arguments, **options)
        output = output[0] if isinstance(output, tuple) else output
        if not attention.calls:
            return [output]
        attention_call = attention.calls[-1]
        blocks = self._float32.cache.read(attention_call.layer, 0)
        results = [attention_call.query, *(block[:, : len(_TOKENS)] for block in blocks)]
        return [*results, output] if scale <= _MODERATE else results


def _float_tensors(call: ModuleCall) -> Iterator[torch.Tensor]:
    """Yield the floating-point arguments of a call, including those in pairs (cos and sin)."""
    for value in (*call.arguments, *call.options.values()):
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, torch.Tensor) and item.is_floating_point():
                yield item


def _scaled(call: ModuleCall, scale: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments in float32, with the first tensor (the hidden state) scaled."""
    first = next(_float_tensors(call))

    def converted(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(converted, value))
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.float() * scale if value is first else value.float()
        return value

    options = {name: converted(value) for name, value in call.options.items()}
    return tuple(map(converted, call.arguments)), options


def _factories(module: Any) -> list[_Factory]:
    """Return factories of the fused modules that may replace a module with these submodules."""
    parts = {name for name, _ in module.named_children()}
    if _is_attention(module, parts):
        offsets = _NORM_OFFSETS if "q_norm" in parts else _NORM_OFFSETS[:1]
        all_pairs = _PAIRS if module.o_proj.weight.is_cuda else _PAIRS[:1]
        return [
            partial(FusedAttention, norm_offset=offset, pairs=pairs)
            for pairs, offset in product(all_pairs, offsets)
        ]
    if any(_has_linears(module, parts - {"act_fn", "activation_fn"}, names) for names in _MLPS):
        return [lambda mlp, _: FusedGatedMLP(mlp)]
    if FusedGatedDeltaNet.fits(module):
        return [lambda layer, _: FusedGatedDeltaNet(layer)]
    if _is_norm(module):
        return [partial(_fused_norm, offset) for offset in _NORM_OFFSETS]
    if _is_norm(module, "LayerNorm") and module.weight.is_cuda:
        return [partial(_fused_norm, 0.0, centered=True)]
    return []


def _fused_norm(offset: float, norm: Any, _: object, *, centered: bool = False) -> nn.Module:
    return FusedRMSNorm(norm, offset, centered=centered)


def _is_attention(module: Any, parts: set[str]) -> bool:
    norms = parts & {"q_norm", "k_norm"}
    return (
        any(_has_linears(module, parts - norms, names) for names in _ATTENTIONS)
        and len(norms) in (0, 2)
        and all(_is_norm(getattr(module, name)) for name in norms)
        and (not norms or _norms_fit(module))
    )


def _norms_fit(attention: Any) -> bool:
    """Return True if the norms of queries and keys are those of heads or, on a CUDA device, of all
    heads together."""
    norms = attention.q_norm, attention.k_norm
    lengths = [len(norm.weight) for norm in norms]
    if lengths == [attention.head_dim] * 2:
        return True
    linears = attention.q_proj, attention.k_proj
    return norms[0].weight.is_cuda and lengths == [each.out_features for each in linears]


def _has_linears(module: Any, parts: set[str], names: set[str]) -> bool:
    return parts == names and all(is_plain(getattr(module, name)) for name in names)


def _is_norm(module: Any, kind: str = "RMSNorm") -> bool:
    weights = dict(module.named_parameters())
    has_eps = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
    return type(module).__name__.endswith(kind) and [*weights] == ["weight"] and has_eps


def fused_line(model: nn.Module) -> str:
    """Return a log line with the number of fused modules of each kind."""
    kinds = {
        FusedAttention: "attention",
        FusedGatedMLP: "gated MLP",
        FusedMixture: "mixture of experts",
        FusedGatedDeltaNet: "Gated DeltaNet",
        FusedRMSNorm: "norm",
        FusedDecoderLayer: "layer",
    }
    counts = Counter(map(type, model.modules()))
    listed = [f"{counts[kind]} x {name}" for kind, name in kinds.items() if counts[kind]]
    return f"fused modules: {', '.join(listed) or 'none'}"
