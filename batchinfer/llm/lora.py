"""Finds the adapter of each prompt, given by its name or by vLLM's ``LoRARequest``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType

from batchinfer.builders.context import EngineContext
from batchinfer.llm.prompts import one_for_each


@dataclass(frozen=True)
class LoRARequest:
    """vLLM's class that selects a LoRA adapter."""

    lora_name: str
    lora_int_id: int = 1
    """Ignored, because the name identifies an adapter."""
    lora_path: str = ""
    """Folder or hub id. If an adapter was already loaded from this folder under another name, that
    adapter is used."""
    base_model_name: str | None = None
    """Ignored."""
    lora_local_path: str | None = None
    """Another name for ``lora_path``."""

    def __post_init__(self) -> None:
        if self.lora_local_path and not self.lora_path:
            object.__setattr__(self, "lora_path", self.lora_local_path)

    @property
    def name(self) -> str:
        """Same as ``lora_name``."""
        return self.lora_name


AdapterNames = str | Sequence[str | None] | None
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class Adapters:
    """Adapters of a model; loads an adapter when a call first uses it.

    Args:
        paths: folder or hub id of each adapter that was loaded with the model, keyed by its name.
    """

    def __init__(self, paths: Mapping[str, str], context: EngineContext) -> None:
        self._paths = dict(paths)
        self._numbers = context.adapters
        self._load = context.load_adapter

    def numbers(self, adapter: AdapterNames, lora_request: LoRARequests, count: int) -> list[int]:
        """Return the adapter's number for each of ``count`` prompts; 0 is the base model.

        Raises:
            TypeError, ValueError: an adapter is invalid or unknown, or there are not as many
                adapters as prompts.
            ModelError: a new adapter does not fit this model.
        """
        numbers = self._numbers
        if lora_request is not None:
            if adapter is not None:
                raise ValueError("adapter and lora_request mean the same; keep one")
            requests = requests_of_each(lora_request, count)
            names = {request: self._loaded_name(request) for request in requests if request}
            return [numbers[names[request]] if request else 0 for request in requests]
        names_of_each = one_for_each(
            adapter, (str, NoneType), "adapter", "a name", count, "adapters"
        )
        for name in names_of_each:
            if name is not None and name not in numbers:
                raise ValueError(
                    f"there is no adapter {name!r}; the loaded adapters are: {_listed(numbers)}"
                )
        return [0 if name is None else numbers[name] for name in names_of_each]

    def _loaded_name(self, request: LoRARequest) -> str:
        """Load a request's adapter if necessary, and return the name under which it is loaded."""
        name, path = request.lora_name, request.lora_path
        same = [known for known, place in self._paths.items() if path and _is_same(place, path)]
        if name in self._paths and (not path or name in same):
            return name
        if same:
            return same[0]
        if self._load is None or not path:
            missing = "" if path else " and its lora_path is empty"
            raise ValueError(
                f"lora_request: the adapter {name!r} is not loaded{missing}; load "
                f"it with the model, as in LLM(..., adapters={{{name!r}: "
                f"{path or 'its folder'!r}}}), or give enable_lora=True and its "
                f"path; the loaded adapters are: {_listed(self._paths)}"
            )
        new_name = name if name not in self._paths else f"{name} ({path})"
        self._load(new_name, path)
        self._paths[new_name] = path
        return new_name


def requests_of_each(lora_request: LoRARequests, count: int) -> list[LoRARequest | None]:
    what, plural = "LoRARequest(...)", "lora_requests"
    kinds = (LoRARequest, NoneType)
    return one_for_each(lora_request, kinds, "lora_request", what, count, plural)


def _is_same(one: str, other: str) -> bool:
    both_exist = os.path.exists(one) and os.path.exists(other)
    return os.path.samefile(one, other) if both_exist else one == other


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(names) or "(none)"
