"""Which adapter each prompt runs through: by its name, or by vLLM's ``LoRARequest``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchinfer.builders.context import EngineContext
from batchinfer.llm.prompts import kind_of, listed


@dataclass(frozen=True)
class LoRARequest:
    """An adapter, as vLLM's calls ask for it."""

    lora_name: str
    lora_int_id: int = 1
    """Of no meaning here: names tell adapters apart."""
    lora_path: str = ""
    """Where it is: a folder or hub id; an adapter under another name is found by it."""
    base_model_name: str | None = None
    """Of no meaning here."""
    lora_local_path: str | None = None
    """Another name of ``lora_path``."""

    def __post_init__(self) -> None:
        if self.lora_local_path and not self.lora_path:
            object.__setattr__(self, "lora_path", self.lora_local_path)

    @property
    def name(self) -> str:
        """``lora_name``."""
        return self.lora_name


class Adapters:
    """Adapters of a model, by name and by place; those that a call brings are loaded.

    Args:
        paths: of the adapters that it was loaded with, by name.
    """

    def __init__(self, paths: Mapping[str, str], context: EngineContext) -> None:
        self._paths = dict(paths)
        self._numbers = context.adapters
        self._load = context.load_adapter

    def of_each(
        self,
        adapter: str | Sequence[str | None] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        count: int,
    ) -> list[int]:
        """The number of each of ``count`` prompts' adapter; 0 is the base model.

        Args:
            adapter: a name for all, or one each.
            lora_request: the same, as vLLM has it; one that is not there is loaded.

        Raises:
            TypeError, ValueError: it is no name, there is no such adapter, or they are not as many.
            ModelError: one that is to be loaded is none of this model.
        """
        numbers = self._numbers
        if lora_request is not None:
            if adapter is not None:
                raise ValueError("adapter and lora_request mean the same; keep one")
            kind = "LoRARequest(...)"
            requests = _of_each(lora_request, LoRARequest, "lora_request", kind, count)
            names = {request: self._name(request) for request in {*requests} - {None}}
            return [0 if request is None else numbers[names[request]] for request in requests]
        given = _of_each(adapter, str, "adapter", "a name", count)
        for name in given:
            if name is not None and name not in numbers:
                raise ValueError(f"there is no adapter {name!r}; known: {_known(numbers)}")
        return [0 if name is None else numbers[name] for name in given]

    def _name(self, request: LoRARequest) -> str:
        """The name of a request's adapter here, which is loaded if it is not."""
        name, path = request.lora_name, request.lora_path
        same = [known for known, place in self._paths.items() if path and _is_same(place, path)]
        if name in self._paths and (not path or name in same):
            return name
        if same:
            return same[0]
        if self._load is None or not path:
            lacks = "" if path else ", and has no lora_path to load it from"
            raise ValueError(
                f"lora_request: the adapter {name!r} is not loaded{lacks}; load it with the model, "
                f"LLM(..., adapters={{{name!r}: {path or 'its folder'!r}}}), or give enable_lora="
                f"True and its path; known: {_known(self._paths)}"
            )
        own = name if name not in self._paths else f"{name} ({path})"
        self._load(own, path)
        self._paths[own] = path
        return own


def requests_of_each(
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None, count: int
) -> list[LoRARequest | None]:
    """What each of ``count`` outputs shows as its request."""
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return [lora_request] * count
    return list(lora_request)


def _of_each(value: Any, one: type, name: str, what: str, count: int) -> list[Any]:
    values: list[Any] = [value] * count
    if not (value is None or isinstance(value, one)):
        values = listed(value, name, f"{what}, or a list of one for each prompt")
        if len(values) != count:
            raise ValueError(f"{count} prompts, but {len(values)} {name}s")
    for item in values:
        if item is not None and not isinstance(item, one):
            raise TypeError(f"{name} is {kind_of(item)}; give {what}")
    return values


def _is_same(one: str, other: str) -> bool:
    """Whether two folders or hub ids are one."""
    both_there = os.path.exists(one) and os.path.exists(other)
    return os.path.samefile(one, other) if both_there else one == other


def _known(names: Iterable[str]) -> str:
    return ", ".join(names) or "(none)"
