"""LoRA adapters in a loaded model: added to its linear layers, and computed there.

The method is that of Hu et al. 2021 (https://arxiv.org/abs/2106.09685). A layer computes
``x @ weight.T`` for every row of a step as it would without adapters, from whatever its weight is
stored in. Then ``(x @ A.T) @ B.T`` is added to the rows of each adapter that
the step uses, one adapter after the other: rows of one share its two small products (the idea of
SGMV, Chen et al. 2023, https://arxiv.org/abs/2310.18547); on a CUDA device one kernel takes all
adapters (``stacked``). Rows without an adapter are not touched.
Adapters go into a loaded model whatever its layers were merged into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.errors import DeviceError, ModelError
from batchinfer.worker.attention.attention import current_context
from batchinfer.worker.fusion.native_layers import layers_of
from batchinfer.worker.linear.packed_linear import PackedLinear, packs
from batchinfer.worker.linear_kernels import LinearKernel
from batchinfer.worker.lora.checkpoint import Adapter
from batchinfer.worker.lora.factors import Factors, rows_of
from batchinfer.worker.lora.stacked import StackedLoraSum
from batchinfer.worker.verify import Probe

_TOKENS = (3, 7)


class _LayerFactors(nn.Module):
    """One adapter's factors of one layer: its A matrices side by side, each B for itself."""

    def __init__(self, factors: list[Factors], kernel: LinearKernel | None) -> None:
        super().__init__()
        self._down = _linear(torch.cat([one.down for one in factors]), kernel)
        self._ups = nn.ModuleList(_linear(one.up, kernel) for one in factors)
        ranks = [len(one.down) for one in factors]
        ends = torch.tensor(ranks).cumsum(0).tolist()
        self._slices = [
            (slice(end - rank, end), slice(one.start, one.start + len(one.up)))
            for one, rank, end in zip(factors, ranks, ends, strict=True)
        ]

    def add(self, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add the product of the factors and ``x`` [T, in] to ``rows`` [n] of ``out`` [T, out]."""
        lowered = self._down(x.index_select(0, rows))
        for up, (inner, outer) in zip(self._ups, self._slices, strict=True):
            out[:, outer].index_add_(0, rows, up(lowered[:, inner]))


class LoraSum(nn.Module):
    """The adapters of one linear layer on a CPU; a forward hook of it.

    Args:
        kernel: what multiplies by the adapters' matrices; None: torch does.
    """

    def __init__(self, kernel: LinearKernel | None) -> None:
        super().__init__()
        self._kernel = kernel
        self._by_adapter: dict[int, _LayerFactors] = {}

    def put(self, adapter: int, factors: list[Factors]) -> None:
        """Add an adapter's factors."""
        layer_factors = _LayerFactors(factors, self._kernel)
        self._by_adapter[adapter] = layer_factors
        self.add_module(str(adapter), layer_factors)

    def forward(self, layer: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
        """Add to ``output`` [..., out], contiguous, in place; ``arguments`` are the layer's x."""
        context = current_context()
        if context.adapters is None:
            return
        x, out = rows_of(layer, arguments[0], output)
        for adapter, rows in context.adapters.each(context.tensors["adapter_tokens"]):
            factors = self._by_adapter.get(adapter)
            if factors is not None:
                factors.add(x, rows, out)


def _linear(weight: torch.Tensor, kernel: LinearKernel | None) -> nn.Module:
    """A layer without bias; on a CPU packed, so that rows do not depend on each other."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if kernel is None or not packs(linear, kernel, weight.dtype):
        return linear
    return PackedLinear(linear, kernel)


def add_adapters(
    model: nn.Module,
    layout: KVLayout,
    adapters: Sequence[Adapter],
    kernel: LinearKernel | None = None,
    *,
    first: int = 1,
) -> None:
    """Read the adapters' weights and let rows of a step run through them, numbered from ``first``.

    Args:
        model: loaded, its layers fused or not.
        layout: of a pool for it.
        adapters: checked against the model's config.
        kernel: what multiplies by their matrices; None: torch does.

    Raises:
        ModelError: naming the adapter, when its layers cannot be added to.
        DeviceError: the weights do not fit the device.
    """
    weight = next(model.parameters())
    for number, adapter in enumerate(adapters, start=first):
        try:
            _add_adapter(model, number, adapter, weight, kernel)
            _check_called(model, layout, number, adapter)
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"model.adapters.{adapter.name} does not fit the device") from error


def _add_adapter(
    model: nn.Module,
    number: int,
    adapter: Adapter,
    like: torch.Tensor,
    kernel: LinearKernel | None,
) -> None:
    by_layer: dict[nn.Module, list[Factors]] = {}
    for target in adapter.targets:
        layer, start = _current_module(model, target.module)
        down, up = (factor.to(like.device, like.dtype) for factor in adapter.factors(target))
        by_layer.setdefault(layer, []).append(Factors(down, up, start))
    for layer, factors in by_layer.items():
        lora = getattr(layer, "lora", None)
        if lora is None:
            lora = StackedLoraSum() if like.is_cuda else LoraSum(kernel)
            layer.lora = lora
            layer.register_forward_hook(lora)
        lora.put(number, factors)


def _current_module(model: nn.Module, name: str) -> tuple[Any, int]:
    """The module that computes a linear layer of transformers' model now, and its first output
    there."""
    module: Any = model
    for part in name.split("."):
        if isinstance(module, nn.ModuleList):
            module = layers_of(module)
        starts = getattr(module, "starts", {})
        if part in starts:
            merged_name, start = starts[part]
            return getattr(module, merged_name), start
        module = getattr(module, part)
    return module, 0


def _check_called(model: nn.Module, layout: KVLayout, number: int, adapter: Adapter) -> None:
    """Check, on a few tokens, that an adapter's layers are called with a step's rows."""
    probe = Probe(model, layout, _TOKENS, num_sequences=2, adapters=(number, 0))
    try:
        probe.logits()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code does with its layers
        raise ModelError(
            f"model.adapters.{adapter.name} changes layers that cannot be added to: {error}"
        ) from error
