"""Mixtures of experts on a CUDA device, in six launches instead of more than twenty.

transformers chooses experts and sorts rows with some twenty operations of torch. Its products wait
for the device, except with bfloat16 on some devices, so that CUDA graphs cannot capture them.
``kernels/route.py`` and ``kernels/experts.py`` never wait, and a row's bits do not depend on other
rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from batchinfer.kernels.experts import (
    ExpertMatrix,
    GatedActivation,
    add_experts,
    multiply_experts,
)
from batchinfer.kernels.route import Routing, plan_experts, route, supports_groups
from batchinfer.worker.fusion.fused_modules import (
    FusedGatedMLP,
    keep_plain_attributes,
)
from batchinfer.worker.linear.packed_experts import has_plain_weights, matrices_of
from batchinfer.worker.linear.packed_linear import merged
from batchinfer.worker.model.quantization import is_plain, is_plain_weight
from batchinfer.worker.self_test import record_calls, verify

_ROUTERS = ("gate", "router")
_SHARED_GATE = "shared_expert_gate"
_BIASES = ("e_score_correction_bias", "expert_bias")
_SCALES = ("routed_scaling_factor", "route_scale")
_ROTATIONS = 16
_MLP = {"gate_proj", "up_proj", "down_proj"}


@dataclass(frozen=True)
class MixtureParts:
    """The submodules of transformers' mixture."""

    experts: Any
    router: Any
    linear: Any
    """The router, or the module inside it, with the weight [experts, hidden]."""
    shared_name: str
    """Name of the MLP that all tokens use; empty: none."""
    has_shared_gate: bool

    @classmethod
    def of(cls, mixture: Any) -> MixtureParts | None:
        """Return the parts of a mixture on a CUDA device; None if a module is none, or if the
        kernels do not support its structure."""
        children = dict(mixture.named_children())
        experts = children.pop("experts", None)
        routers = [children.pop(name) for name in _ROUTERS if name in children]
        has_shared_gate = children.pop(_SHARED_GATE, None) is not None
        if experts is None or not has_plain_weights(experts) or len(routers) != 1:
            return None
        linears = [linear for linear in routers[0].modules() if _is_router_linear(linear, experts)]
        names = [name for name, child in children.items() if not isinstance(child, nn.Identity)]
        fits = (
            experts.has_gate
            and experts.down_proj.is_cuda
            and hasattr(routers[0], "top_k")
            and len(linears) == 1
            and len(names) <= 1
            and all(_is_mlp(children[name]) for name in names)
            and (names or not has_shared_gate)
        )
        shared_name = names[0] if names else ""
        return cls(experts, routers[0], linears[0], shared_name, has_shared_gate) if fits else None


def _is_router_linear(module: Any, experts: Any) -> bool:
    weight = getattr(module, "weight", None)
    return is_plain_weight(weight) and weight.dim() == 2 and len(weight) == experts.num_experts


def _is_mlp(module: nn.Module) -> bool:
    parts = {name for name, _ in module.named_children()} - {"act_fn"}
    return parts == _MLP and all(is_plain(getattr(module, name)) for name in _MLP)


def float32_copy(module: nn.Module) -> Any:
    """Return a copy in float32. All experts of a layer in the copy are its first expert, because a
    layer's experts may take most of the device's memory."""
    memo: dict[int, Any] = {}
    for experts in filter(has_plain_weights, module.modules()):
        for matrix in matrices_of(experts):
            parameter = getattr(experts, matrix.name)
            first = parameter.detach()[:1].float().expand(parameter.shape)
            memo[id(parameter)] = nn.Parameter(first, requires_grad=False)
    return copy.deepcopy(module, memo).float()


def chooses_alike(
    mixture: Any, fused: FusedMixture, hidden: torch.Tensor, tolerance: float
) -> bool:
    """Return True if transformers' mixture and the fused mixture choose the same experts, with the
    same weights, for hidden states [1, T, hidden] and for rotations of their elements."""
    hidden = torch.cat([hidden.roll(shift, dims=-1) for shift in range(_ROTATIONS)], dim=1)
    with record_calls([mixture.experts]) as calls:
        mixture(hidden)
    _, *theirs = calls[-1].arguments
    _, *own = fused.route(hidden.reshape(-1, hidden.shape[-1]))
    shape = len(theirs[0]), fused.experts.num_experts
    before, after = (
        torch.zeros(shape, device=hidden.device).scatter(1, experts.long(), weights.float())
        for experts, weights in (theirs, own)
    )
    return verify(before, after, tolerance)


def routings(mixture: Any, parts: MixtureParts) -> Iterator[Routing]:
    """Yield the ways in which a mixture may choose its experts, by the settings that it has."""
    router = parts.router
    num_groups = int(_setting((router,), ("num_group", "n_group"), 1) or 1)
    plain = Routing(
        num_experts=parts.experts.num_experts,
        num_chosen=int(router.top_k),
        scale=float(_setting((router, mixture), _SCALES, 1.0)),
        num_groups=num_groups,
        top_groups=int(_setting((router,), ("topk_group",), 1) or 1),
        gates_shared=parts.has_shared_gate,
    )
    if num_groups > 1 and not supports_groups(plain.num_experts, num_groups):
        return
    without_groups = replace(plain, num_groups=1, top_groups=1)
    kinds = [replace(plain, group_sum=2), plain] if num_groups > 1 else []
    for sigmoid, renormalizes, kind in product(
        (False, True), (True, False), (*kinds, without_groups)
    ):
        yield replace(kind, sigmoid=sigmoid, renormalizes=renormalizes)


def _setting(owners: tuple[Any, ...], names: tuple[str, ...], default: Any) -> Any:
    """Return the first attribute that a module has."""
    found = (getattr(owner, name) for owner in owners for name in names if hasattr(owner, name))
    return next(found, default)


class FusedMixture(nn.Module):
    """A mixture of experts, and of experts that all tokens use.

    Args:
        mixture: transformers' module, which has ``MixtureParts``.
        routing: how the mixture chooses its experts.
        logits_dtype: dtype in which the mixture computes its logits.
        returns_pair: True if the module returns its output and one more value.
    """

    def __init__(
        self, mixture: Any, routing: Routing, *, logits_dtype: torch.dtype, returns_pair: bool
    ) -> None:
        super().__init__()
        parts = MixtureParts.of(mixture)
        assert parts is not None
        keep_plain_attributes(self, mixture)
        self.experts = parts.experts
        self.router = _router(parts, mixture, logits_dtype)
        self.starts = {_SHARED_GATE: ("router", routing.num_experts)}
        self._shared_name = parts.shared_name
        if parts.shared_name:
            setattr(self, parts.shared_name, FusedGatedMLP(getattr(mixture, parts.shared_name)))
        bias = _setting((parts.router, mixture), _BIASES, None)
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self._routing, self._returns_pair = routing, returns_pair
        self._activation = GatedActivation(
            interleaved=not self.experts.is_concatenated,
            alpha=getattr(self.experts, "alpha", 1.0),
            limit=getattr(self.experts, "limit", None),
        )
        self.residual: torch.Tensor | None = None
        """[T, hidden], to which the next call adds its output, if the caller sets it."""

    def forward(self, hidden_states: torch.Tensor) -> Any:
        """Return the output for hidden states [1, T, hidden], in the same shape; with a residual,
        add it to the residual, and return the residual."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        residual, self.residual = self.residual, None
        out = torch.empty_like(rows) if residual is None else residual
        num_shared = self._num_folded()
        logits, experts, weights = self.route(rows, num_shared)
        products = self._products(rows, experts, num_shared)
        add_experts(products, weights, out=out, adds=residual is not None)
        if self._shared is not None and not num_shared:
            also = self._shared(rows)
            out += also * logits[:, -1:].sigmoid() if self._routing.gates_shared else also
        output = out.view(hidden_states.shape)
        return (output, weights) if self._returns_pair else output

    def route(
        self, rows: torch.Tensor, num_shared: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the logits, the experts [T, k + num_shared] and their weights for rows
        [T, hidden].

        Args:
            num_shared: number of shared experts to list after the chosen ones.
        """
        logits = self.router(rows.to(self.router.weight.dtype))
        routing = replace(self._routing, num_shared=num_shared)
        shape = len(rows), routing.per_token
        experts = torch.empty(shape, dtype=torch.int32, device=rows.device)
        weights = torch.empty(shape, dtype=torch.float32, device=rows.device)
        bias: Any = self.bias
        route(logits, bias, routing, experts=experts, weights=weights)
        return logits, experts, weights

    def _products(self, rows: torch.Tensor, experts: torch.Tensor, num_shared: int) -> torch.Tensor:
        """Return the outputs of each token's experts, [T * per_token, hidden]."""
        work = plan_experts(experts, self._routing.num_experts + num_shared)
        gate_up, down = matrices_of(self.experts)
        joined: Any = (None, None)
        if num_shared:
            joined = self._shared.gate_up_proj.weight, self._shared.down_proj.weight
        inner = rows.new_empty(experts.numel(), down.weight.shape[2])
        products = rows.new_empty(experts.numel(), rows.shape[1])
        multiply_experts(
            rows,
            work,
            ExpertMatrix(gate_up.weight, gate_up.joined_bias, joined[0], num_shared),
            out=inner,
            activation=self._activation,
        )
        multiply_experts(
            inner,
            work,
            ExpertMatrix(down.weight, down.joined_bias, joined[1], num_shared),
            out=products,
        )
        return products

    @property
    def _shared(self) -> Any:
        """The MLP that all tokens use, or None."""
        return getattr(self, self._shared_name) if self._shared_name else None

    def _num_folded(self) -> int:
        """Return how many experts of the layer's width the shared MLP makes. Return 0 if there is
        none, or if the products of all experts cannot include it, because it is quantized, or has
        adapters or another width."""
        if self._shared is None or self.experts.is_transposed or self.experts.has_bias:
            return 0
        like = self.experts.down_proj
        for linear in (self._shared.gate_up_proj, self._shared.down_proj):
            if not is_plain(linear) or linear.bias is not None or hasattr(linear, "lora"):
                return 0
            if linear.weight.dtype != like.dtype:
                return 0
        count, rest = divmod(self._shared.down_proj.in_features, like.shape[2])
        return 0 if rest else int(count)


def _router(parts: MixtureParts, mixture: Any, dtype: torch.dtype) -> nn.Linear:
    """Return a linear layer for the router's logits and, after them, the gate of shared experts."""
    router = _linear(parts.linear.weight, getattr(parts.linear, "bias", None), dtype)
    if parts.has_shared_gate:
        gate = getattr(mixture, _SHARED_GATE)
        router = merged(router, _linear(gate.weight, gate.bias, dtype))
    router.is_router = True  # type: ignore[assignment]
    return router


def _linear(weight: torch.Tensor, bias: Any, dtype: torch.dtype) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
    return linear
