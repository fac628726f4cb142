"""LoRA adapters in a loaded model: added to its linear layers, and computed there.

Implements LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685). A layer computes
``x @ weight.T`` for every row of a step, however the weight is stored; then ``(x @ A.T) @ B.T`` is
added to the rows of each adapter that the step uses (``sums``). Adapters work in fused layers too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.errors import DeviceError, ModelError
from batchinfer.worker.fusion.native_layers import layers_of
from batchinfer.worker.linear_kernels import LinearKernel
from batchinfer.worker.lora.checkpoint import Adapter, read_adapters
from batchinfer.worker.lora.sums import Factors, LoraSum, StackedLoraSum
from batchinfer.worker.verify import Probe

_TOKENS = (3, 7)


class AdapterLoader:
    """Loads further adapters into a model whose layers were kept separate for them, between calls.

    Args:
        config: of the model.
        layout: of a pool for it.
        numbers: numbers of its adapters.
        check: raises for an adapter that conflicts with how the model is run.
        added: called with the number of adapters after each, as captured graphs are stale then.
        kernel: multiplies by adapters' matrices; None: torch does.
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
        """Numbers of all adapters by name, for ``Request.adapter``."""

    def load(self, name: str, path: str) -> None:
        """Add an adapter, a folder or hub id, while no step is running.

        Raises:
            ModelError: naming it: it is missing, cannot be run, or was made for another model.
            DeviceError: it does not fit the device.
        """
        (adapter,) = read_adapters({name: path}, self._config)
        self._check(adapter)
        self._last += 1  # after a failure no request uses this number
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

    Args:
        model: its layers may be fused.
        layout: of a pool for it.
        adapters: checked against the model's config.
        kernel: multiplies by their matrices; None: torch does.

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
    """The module that now computes a linear layer of transformers' model, and the layer's first
    output in it."""
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
    except Exception as error:  # a model's own code may use its layers in any way
        raise ModelError(
            f"model.adapters.{adapter.name} changes layers that cannot be added to: {error}"
        ) from error
