"""Adds LoRA adapters to the linear layers of a loaded model, using forward hooks.

Implements LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685). A layer computes ``x @
weight.T`` for every row of a step, with a weight of any format. For each adapter in the step, a
forward hook of the layer then adds ``(x @ A.T) @ B.T`` to the adapter's rows. Fused layers support
adapters too.

On a CPU, adapters are computed one after another. Each adapter takes two small matrix
multiplications for all of its rows (the idea of SGMV, Chen et al. 2023,
https://arxiv.org/abs/2310.18547). On a CUDA device, each kernel launch computes all adapters. Rows
without an adapter do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.errors import DeviceError, ModelError
from batchinfer.worker.attention.attention import current_context
from batchinfer.worker.fusion.native_layers import layers_of
from batchinfer.worker.linear.packed_linear import PackedLinear, packs
from batchinfer.worker.linear_kernels import LinearKernel
from batchinfer.worker.lora.adapter_checkpoint import Adapter, read_adapters
from batchinfer.worker.self_test import Probe

_TOKENS = (3, 7)


class Factors(NamedTuple):
    """One adapter's matrices A and B for a slice of a layer's outputs."""

    down: torch.Tensor  # [rank, in], A
    up: torch.Tensor  # [out, rank], B times the adapter's scale
    start: int


class LoraSum(nn.Module):
    """Forward hook that adds the adapters' outputs to one linear layer's output, on a CPU.
    ``kernel`` multiplies by the adapters' matrices; None: torch."""

    def __init__(self, kernel: LinearKernel | None) -> None:
        super().__init__()
        self._kernel = kernel
        self._by_adapter: dict[int, _LayerFactors] = {}

    def put(self, adapter: int, factors: list[Factors]) -> None:
        layer_factors = _LayerFactors(factors, self._kernel)
        self._by_adapter[adapter] = layer_factors
        self.add_module(str(adapter), layer_factors)

    def forward(self, layer: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
        """Add to the contiguous ``output`` [..., out] in place; ``arguments`` hold the input x."""
        context = current_context()
        if context.adapters is None:
            return
        x, out = _as_matrices(layer, arguments[0], output)
        for adapter, rows in context.adapters.each(context.tensors["adapter_tokens"]):
            factors = self._by_adapter.get(adapter)
            if factors is not None:
                factors.add(x, rows, out)


class _LayerFactors(nn.Module):
    """One adapter's factors for one layer, with the A matrices concatenated."""

    def __init__(self, factors: list[Factors], kernel: LinearKernel | None) -> None:
        super().__init__()
        self._down = _linear(torch.cat([part.down for part in factors]), kernel)
        self._ups = nn.ModuleList(_linear(part.up, kernel) for part in factors)
        self._slices = []
        first = 0
        for part in factors:
            last = first + len(part.down)
            outputs = slice(part.start, part.start + len(part.up))
            self._slices.append((slice(first, last), outputs))
            first = last

    def add(self, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add ``(x @ A.T) @ B.T`` to ``out`` [T, out] for the ``rows`` [n] of ``x`` [T, in]."""
        lowered = self._down(x.index_select(0, rows))
        for up, (inner, outer) in zip(self._ups, self._slices, strict=True):
            out[:, outer].index_add_(0, rows, up(lowered[:, inner]))


def _linear(weight: torch.Tensor, kernel: LinearKernel | None) -> nn.Module:
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if kernel is None or not packs(linear, kernel, weight.dtype):
        return linear
    return PackedLinear(linear, kernel)


class _Slice(NamedTuple):
    start: int
    width: int


class StackedLoraSum(nn.Module):
    """Forward hook that adds the adapters' outputs to one linear layer's output, on a CUDA device.

    The factors of all adapters are stacked in one tensor; adapters with a lower rank or fewer
    slices are padded with zeros. The kernels read each adapter's row indices on the device, so CUDA
    graphs can capture the launches.
    """

    def __init__(self) -> None:
        super().__init__()
        self._factors: dict[int, list[Factors]] = {}
        self._ranks: dict[_Slice, slice] = {}
        self._down: torch.Tensor  # [adapters, ranks of all slices, in]
        self._ups: dict[_Slice, torch.Tensor] = {}  # [adapters, out, rank] each

    def put(self, adapter: int, factors: list[Factors]) -> None:
        """Copy an adapter's factors."""
        self._factors[adapter] = factors
        self._stack(factors[0].down)

    def _stack(self, like: torch.Tensor) -> None:
        ranks: dict[_Slice, int] = {}
        for factors in self._factors.values():
            for part in factors:
                key = _slice_of(part)
                ranks[key] = max(ranks.get(key, 0), len(part.down))
        end, num_adapters = 0, max(self._factors)
        for key, rank in ranks.items():
            self._ranks[key] = slice(end, end + rank)
            end += rank
        down = like.new_zeros(num_adapters, end, like.shape[1])
        ups = {key: like.new_zeros(num_adapters, key.width, rank) for key, rank in ranks.items()}
        for adapter, factors in self._factors.items():
            for index, part in enumerate(factors):
                key, rank = _slice_of(part), len(part.down)
                into = down[adapter - 1, self._ranks[key]][:rank], ups[key][adapter - 1, :, :rank]
                into[0].copy_(part.down)
                into[1].copy_(part.up)
                # Replaces and frees the adapter's tensors.
                factors[index] = Factors(*into, part.start)
        self.register_buffer("_down", down)
        for key, up in ups.items():
            self.register_buffer(f"_up_{key.start}_{key.width}", up)
        self._ups = ups

    def forward(self, layer: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
        """Add to the contiguous ``output`` [..., out] in place; ``arguments`` hold the input x."""
        from batchinfer.kernels.lora import lora_expand, lora_shrink, num_splits

        tensors = current_context().tensors
        if "adapter_starts" not in tensors:
            return
        rows, starts = tensors["adapter_tokens"], tensors["adapter_starts"]
        x, out = _as_matrices(layer, arguments[0], output)
        pieces = (num_splits(x.shape[1]), len(rows), self._down.shape[1])
        lowered = x.new_empty(pieces, dtype=torch.float32)
        lora_shrink(x, self._down, rows, starts, lowered=lowered)
        for key, up in self._ups.items():
            outputs = out[:, key.start : key.start + key.width]
            lora_expand(lowered[..., self._ranks[key]], up, rows, starts, out=outputs)


def _slice_of(factors: Factors) -> _Slice:
    return _Slice(factors.start, len(factors.up))


def _as_matrices(
    layer: nn.Module, x: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's input and output as matrices [T, in] and [T, out].

    Raises:
        RuntimeError: the layer's input does not have a row for each token of the step.
    """
    x, out = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
    if len(x) != len(current_context().tensors["positions"]):
        raise RuntimeError(f"a {type(layer).__name__} gets only some rows of a step")
    return x, out


class AdapterLoader:
    """Loads more adapters into a model between calls to ``LLM.generate``.

    Args:
        numbers: number of each adapter of the model, keyed by name.
        check: raises an error if the model's settings do not allow an adapter.
        added: called with the new number of adapters after each load, which invalidates captured
            graphs.
    """

    def __init__(
        self,
        model: nn.Module,
        config: PreTrainedConfig,
        layout: KVLayout,
        *,
        numbers: Mapping[str, int],
        check: Callable[[Adapter], None],
        added: Callable[[int], None],
        kernel: LinearKernel | None,
    ) -> None:
        self._model, self._config, self._layout, self._kernel = model, config, layout, kernel
        self._check, self._added = check, added
        self._last = len(numbers)
        self.numbers = dict(numbers)

    def load(self, name: str, path: str) -> None:
        """Add the adapter in a folder or hub repository, while no step is running.

        Raises:
            ModelError: the adapter is missing, is not supported, or belongs to another model.
            DeviceError: the adapter does not fit into the device's memory.
        """
        (adapter,) = read_adapters({name: path}, self._config)
        self._check(adapter)
        self._last += 1  # if loading fails below, this number stays unused
        add_adapters(self._model, self._layout, [adapter], self._kernel, first=self._last)
        self.numbers[name] = self._last
        self._added(self._last)


def add_adapters(
    model: nn.Module,
    layout: KVLayout,
    adapters: Sequence[Adapter],
    kernel: LinearKernel | None = None,
    *,
    first: int = 1,
) -> None:
    """Read the adapters' weights and add them to the model, numbered from ``first``.

    Raises:
        ModelError: an adapter changes layers that do not support adapters.
        DeviceError: the weights do not fit into the device's memory.
    """
    weight = next(model.parameters())
    for number, adapter in enumerate(adapters, start=first):
        try:
            _add_adapter(model, number, adapter, weight, kernel)
            _check_called(model, layout, number, adapter)
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"model.adapters.{adapter.name} does not fit into the device's memory",
                hint="use fewer adapters, or a device with more memory",
            ) from error


def _add_adapter(
    model: nn.Module,
    number: int,
    adapter: Adapter,
    like: torch.Tensor,
    kernel: LinearKernel | None,
) -> None:
    by_layer: dict[nn.Module, list[Factors]] = {}
    for target in adapter.targets:
        layer, start, order = _current_module(model, target.module)
        down, up = (factor.to(like.device, like.dtype) for factor in adapter.factors(target))
        up = up if order is None else up[order]
        by_layer.setdefault(layer, []).append(Factors(down, up, start))
    for layer, factors in by_layer.items():
        lora = getattr(layer, "lora", None)
        if lora is None:
            lora = StackedLoraSum() if like.is_cuda else LoraSum(kernel)
            layer.lora = lora
            layer.register_forward_hook(lora)
        lora.put(number, factors)


def _current_module(model: nn.Module, name: str) -> tuple[Any, int, torch.Tensor | None]:
    """Return the module that computes a linear layer after fusion, and the index of the layer's
    first output in that module. If the module computes the
    layer's outputs in another order, also return their numbers in that order."""
    module: Any = model
    parts = name.split(".")
    for at, part in enumerate(parts):
        if isinstance(module, nn.ModuleList):
            module = layers_of(module)
        rest, starts = ".".join(parts[at:]), getattr(module, "starts", {})
        if rest in starts:
            merged_name, start = starts[rest]
            order = getattr(module, "orders", {}).get(rest)
            return getattr(module, merged_name), start, order
        module = getattr(module, part)
    return module, 0, None


def _check_called(model: nn.Module, layout: KVLayout, number: int, adapter: Adapter) -> None:
    """Run a few tokens, to check that an adapter's layers get a row for each token."""
    probe = Probe(model, layout, _TOKENS, num_sequences=2, adapters=(number, 0))
    try:
        probe.logits()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model's code may use its layers in any way
        raise ModelError(
            f"model.adapters.{adapter.name} changes layers that adapters cannot change: {error}"
        ) from error
