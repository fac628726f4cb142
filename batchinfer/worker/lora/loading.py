"""Adapters that are added to a model while it is in use, between two calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from transformers import PreTrainedConfig

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.worker.linear_kernels import LinearKernel
from batchinfer.worker.lora.checkpoint import Adapter, read_adapters
from batchinfer.worker.lora.lora import add_adapters


class AdapterLoader:
    """Loads further adapters into a model whose layers were left apart for them.

    Args:
        config: of the model.
        layout: of a pool for it.
        numbers: of the adapters that it has.
        check: raises for an adapter that does not go with how the model is run.
        added: told how many numbers there are, after each: what was captured is stale.
        kernel: what multiplies by adapters' matrices; None: torch does.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: PreTrainedConfig,
        layout: KVLayout,
        *,
        numbers: Mapping[str, int],
        check: Callable[[Adapter], None],
        added: Callable[[int], None],
        kernel: LinearKernel | None,
    ) -> None:
        self._model = model
        self._config = config
        self._layout = layout
        self._check = check
        self._added = added
        self._kernel = kernel
        self._last = len(numbers)
        self.numbers = dict(numbers)
        """Of all adapters by name, for ``Request.adapter``."""

    def load(self, name: str, path: str) -> None:
        """Add an adapter, a folder or hub id; no step may be under way.

        Raises:
            ModelError: naming it: it is not there, cannot be run, or is not one of this model.
            DeviceError: it does not fit the device.
        """
        (adapter,) = read_adapters({name: path}, self._config)
        self._check(adapter)
        self._last += 1  # one that failed half-way is never asked for
        add_adapters(self._model, self._layout, [adapter], self._kernel, first=self._last)
        self.numbers[name] = self._last
        self._added(self._last)
