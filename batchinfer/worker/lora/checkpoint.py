"""Reads LoRA adapters as peft saves them, and checks them against the config of their model.

Only adapter_config.json and adapter_model.safetensors are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from batchinfer.errors import ModelError
from batchinfer.worker.lora.config import LoraConfig, NotSupportedError
from batchinfer.worker.model.checkpoint import check_file, read_json, resolve_folder
from batchinfer.worker.model.language_model import whole_on_meta

_FILES = ("adapter_config.json", "adapter_model.safetensors")
_PREFIX = "base_model.model."
_FACTOR = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight")
_DTYPES = ("F64", "F32", "BF16", "F16")
_ROUTED = re.compile(r"\bexperts\b")


@dataclass(frozen=True, slots=True)
class Linears:
    """The linear layers of a model, by the names that adapters use."""

    shapes: Mapping[str, tuple[int, int]]
    """Inputs and outputs."""
    head: str
    """Name of the output head."""
    body: str
    """Name of the part that adapters can change."""
    own_body: str
    """Name of that part in the model that is run, which may be part of a larger one."""

    def own_name(self, module: str) -> str:
        """Name of a layer in the model that is run."""
        return self.own_body + module.removeprefix(self.body)


@dataclass(frozen=True, slots=True)
class Target:
    """A layer that an adapter changes."""

    saved: str
    """Its name in the adapter's file."""
    module: str
    """Its name in the model that is run."""
    rank: int
    scale: float
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits the model; its weights are not read yet."""

    name: str
    file: Path
    targets: tuple[Target, ...]

    def nbytes(self, element_bytes: int) -> int:
        """Bytes of its factors, given the size of an element."""
        elements = (one.rank * (one.in_features + one.out_features) for one in self.targets)
        return sum(elements) * element_bytes

    def factors(self, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, in], and B times the scale [out, rank], as saved, in float32.

        Raises:
            ModelError: the file changed since it was checked.
        """
        try:
            with safe_open(self.file, framework="pt") as file:
                down, up = (
                    file.get_tensor(f"{_PREFIX}{target.saved}.lora_{factor}.weight").float()
                    for factor in "AB"
                )
        except Exception as error:  # of several libraries
            raise ModelError(f"{self.file} cannot be read: {error}") from error
        return down, up * target.scale


def linears_of(config: PreTrainedConfig) -> Linears:
    """The linear layers that transformers' model of a config has."""
    model, body, own_body = whole_on_meta(config)
    head = model.get_output_embeddings()
    shapes, head_name = {}, ""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            shapes[name] = (module.in_features, module.out_features)
        elif isinstance(module, Conv1D):
            shapes[name] = (module.weight.shape[0], module.weight.shape[1])
        if module is head:
            head_name = name
    return Linears(shapes, head_name, body, own_body)


def read_adapters(paths: Mapping[str, str], config: PreTrainedConfig) -> tuple[Adapter, ...]:
    """Find and check the adapters of ``model.adapters``, in order.

    Args:
        paths: folder or hub id by name.
        config: of the model they are for.

    Raises:
        ModelError: naming the adapter: it is missing, cannot be run, or was made for another model.
    """
    if not paths:
        return ()
    linears = linears_of(config)
    return tuple(_read(name, path, linears) for name, path in paths.items())


def _read(name: str, path: str, linears: Linears) -> Adapter:
    key = f"model.adapters.{name}"
    folder = resolve_folder(path, None, _FILES, key=key)
    values = read_json(folder / _FILES[0])
    if values is None:
        raise ModelError(f"{key}: {folder} holds no adapter: it has no {_FILES[0]}")
    if not (folder / _FILES[1]).exists():
        others = sorted(one.name for one in folder.glob("adapter_model*"))
        what = f"only {others[0]}, which can run code when loaded" if others else "no weights"
        remedy = f"save it from peft as {_FILES[1]}"
        raise ModelError(f"{key}: {folder} has {what}; {remedy}")
    try:
        return Adapter(name, folder / _FILES[1], _targets(folder, LoraConfig(values), linears))
    except NotSupportedError as error:
        raise ModelError(f"{key}: {folder}/{_FILES[0]}: {error}") from None
    except _NotOfThisModelError as error:
        raise ModelError(
            f"{key}: {folder} is not an adapter of this model: {error}",
            hint="give the adapter with the model that it was trained on",
        ) from None


class _NotOfThisModelError(Exception):
    """An adapter's weights do not fit the model."""


def _targets(folder: Path, config: LoraConfig, linears: Linears) -> tuple[Target, ...]:
    path = folder / _FILES[1]
    dtypes, shapes = check_file(path), _shapes(path)
    found: dict[str, set[str]] = {}
    for tensor, dtype in dtypes.items():
        match = _FACTOR.fullmatch(tensor)
        if match is None or dtype not in _DTYPES:
            kind = f"is {dtype}" if match is not None else "is not a factor of a linear layer"
            raise NotSupportedError(
                f"{_FILES[1]} holds {tensor}, which {kind}: not supported"
                + ("" if "lora_" in tensor else " (peft: save with save_embedding_layers=False)")
            )
        found.setdefault(match.group(1), set()).add(match.group(2))
    targets = []
    for module in sorted(found):
        if module not in linears.shapes:
            raise _NotOfThisModelError(f"the model has no linear layer {module}")
        if module == linears.head or _ROUTED.search(module):
            what = "the output head" if module == linears.head else "an expert"
            raise NotSupportedError(f"it changes {module}, {what}, which is not supported")
        if len(found[module]) < 2:
            raise NotSupportedError(f"{_FILES[1]} has only one of two factors of {module}")
        rank, (wide_in, wide_out) = config.rank(module), linears.shapes[module]
        for factor, wanted in (("A", (rank, wide_in)), ("B", (wide_out, rank))):
            tensor = f"{_PREFIX}{module}.lora_{factor}.weight"
            if shapes[tensor] != wanted:
                shape = " x ".join(map(str, shapes[tensor]))
                right = " x ".join(map(str, wanted))
                raise _NotOfThisModelError(f"{tensor} is {shape}, it should be {right}")
        own_name, scale = linears.own_name(module), config.scale(module)
        targets.append(Target(module, own_name, rank, scale, wide_in, wide_out))
    _check_named(set(found), set(config.targets(linears.shapes, linears.head)))
    return tuple(targets)


def _check_named(found: set[str], named: set[str]) -> None:
    """Check that the weights and the configuration belong together."""
    if not found:
        raise NotSupportedError(f"{_FILES[1]} holds no factors")
    for those, others, what in (
        (found, named, "does not name {}, whose factors are in the file"),
        (named, found, "names {}, whose factors are missing"),
    ):
        if missing := sorted(those - others):
            raise NotSupportedError(f"target_modules {what.format(missing[0])}")


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged ({error}); fetch the adapter again") from error
