"""Reads LoRA adapters as peft saves them, and checks that they fit their model.

Only adapter_config.json and adapter_model.safetensors are read.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from batchinfer.errors import ModelError
from batchinfer.worker.model.check_weight_files import check_file
from batchinfer.worker.model.language_model import whole_on_meta
from batchinfer.worker.model.model_folder import read_json, resolve_folder

_FILES = ("adapter_config.json", "adapter_model.safetensors")
_PREFIX = "base_model.model."
_FACTOR = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight")
_DTYPES = ("F64", "F32", "BF16", "F16")
_ROUTED = re.compile(r"\bexperts\b")
_MATCH_SECONDS = 1.0
_KEEPS_BASE = frozenset({"gaussian", "eva", "orthogonal"})
_TRAINING_KEYS = frozenset(
    [
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
        *("revision", "inference_mode", "lora_dropout", "megatron_core", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        "ensure_weight_tying",
    ]
)
"""Keys of adapter_config.json that do not affect the results of a trained adapter."""
_KNOWN_KEYS = frozenset(
    [
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        "init_lora_weights",
    ]
)


class NotSupportedError(Exception):
    """The adapter needs an unsupported feature, or contradicts itself."""


class LoraConfig:
    """A LoRA adapter's configuration, from the values of adapter_config.json.

    Layer names are matched as in peft (peft/tuners/tuners_utils.py, peft/utils/other.py). Matching
    has a time limit, because patterns from an untrusted folder could take forever.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        kind = values.get("peft_type")
        if kind != "LORA":
            raise NotSupportedError(f"peft_type is {kind!r}; only LORA adapters can be run")
        for key in sorted(values.keys() - _TRAINING_KEYS - _KNOWN_KEYS):
            value = values[key]
            if value not in (None, False, "none") and value != {} and value != []:
                raise NotSupportedError(f"{key} is set, which is not supported")
        start = values.get("init_lora_weights", True)
        if not (isinstance(start, bool) or (isinstance(start, str) and start in _KEEPS_BASE)):
            raise NotSupportedError(
                f"init_lora_weights is {start!r}, which changes the base model's "
                "weights; convert the adapter with "
                "path_initial_model_for_weight_conversion in peft"
            )
        self._values = values

    def rank(self, module: str) -> int:
        rank = self._number(module, "rank_pattern", "r", 8)
        if not float(rank).is_integer() or rank < 1:
            raise NotSupportedError(f"a rank is {rank}; ranks must be whole numbers, 1 or more")
        return int(rank)

    def scale(self, module: str) -> float:
        """Return the factor that scales a layer's ``(x @ A.T) @ B.T``."""
        alpha, rank = self._number(module, "alpha_pattern", "lora_alpha", 8), self.rank(module)
        return alpha / (math.sqrt(rank) if self._values.get("use_rslora") else rank)

    def targets(self, linears: Collection[str], head: str) -> Iterator[str]:
        """Yield the names of the linear layers that the configuration names.

        Args:
            head: name of the output head, which ``all-linear`` does not include.
        """
        wanted = self._values.get("target_modules")
        excluded = self._values.get("exclude_modules")
        for name in linears:
            if wanted == "all-linear":
                is_target = name != head
            else:
                is_target = self._names(wanted, name) and self._in_layers(name)
            if is_target and not self._names(excluded, name):
                yield name

    def _names(self, wanted: Any, name: str) -> bool:
        """Return True if ``wanted`` matches a layer's name. ``wanted`` is a pattern for the whole
        name, or a list of names whose first parts may be left out, such as ``"mlp.up_proj"``."""
        if isinstance(wanted, str):
            return _match_with_timeout(f"(?:{wanted})$", name) is not None
        ends = wanted if isinstance(wanted, list) else []
        return any(name == end or name.endswith(f".{end}") for end in ends)

    def _in_layers(self, name: str) -> bool:
        indices, wanted = (
            self._values.get(key) for key in ("layers_to_transform", "target_modules")
        )
        if indices in (None, []) or isinstance(wanted, str) or name in (wanted or ()):
            return True
        patterns = self._values.get("layers_pattern") or r"[^.]*"
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            match = _match_with_timeout(rf".*\.{pattern}\.(\d+)\.", name)
            if match is not None:
                layer = int(match.group(match.re.groups))
                return layer in (indices if isinstance(indices, list) else [indices])
        return False

    def _number(self, module: str, patterns: str, key: str, default: int) -> float:
        """Return a layer's rank or alpha: the value of the first pattern in the mapping
        ``patterns`` that matches the end of the layer's name, or else the value of ``key``."""
        number: Any = self._values.get(key, default)
        by_pattern = self._values.get(patterns) or {}
        if not isinstance(by_pattern, Mapping):
            raise NotSupportedError(f"{patterns} must map patterns to numbers")
        for pattern, value in by_pattern.items():
            if _match_with_timeout(rf"(.*\.)?({pattern})$", module) is not None:
                number = value
                break
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not abs(number) <= sys.float_info.max:
            raise NotSupportedError(
                f"{key} or {patterns} has {number!r:.40}, which is not a number or is too large"
            )
        return float(number)


def _match_with_timeout(pattern: str, name: str) -> Any:
    try:
        return regex.match(pattern, name, timeout=_MATCH_SECONDS)
    except TimeoutError:
        raise NotSupportedError(f"the pattern {pattern!r} takes too long to match") from None
    except regex.error as error:
        raise NotSupportedError(f"the pattern {pattern!r} is invalid: {error}") from None


@dataclass(frozen=True, slots=True)
class Linears:
    """The linear layers of the model that an adapter was trained on."""

    shapes: Mapping[str, tuple[int, int]]
    head: str
    body: str
    """Name of the body in the model that the adapter was trained on."""
    loaded_body: str
    """Name of the body in the loaded model, which has no vision tower."""

    def loaded_name(self, module: str) -> str:
        return self.loaded_body + module.removeprefix(self.body)


@dataclass(frozen=True, slots=True)
class Target:
    saved: str
    """Name of the layer in the adapter's file."""
    module: str
    """Name of the layer in the loaded model."""
    rank: int
    scale: float
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits the model, before its weights are read."""

    name: str
    file: Path
    targets: tuple[Target, ...]

    def nbytes(self, element_bytes: int) -> int:
        """Return the size of all factors at ``element_bytes`` bytes per element."""
        elements = (t.rank * (t.in_features + t.out_features) for t in self.targets)
        return sum(elements) * element_bytes

    def factors(self, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a layer's factors in float32: A [rank, in], and B [out, rank] times the scale.

        Raises:
            ModelError: the adapter's file was changed after it was checked.
        """
        try:
            with safe_open(self.file, framework="pt") as file:
                down, up = (
                    file.get_tensor(f"{_PREFIX}{target.saved}.lora_{factor}.weight").float()
                    for factor in "AB"
                )
        except Exception as error:  # safetensors and torch raise errors of several types
            raise ModelError(f"{self.file} cannot be read: {error}") from error
        return down, up * target.scale


def linears_of(config: PreTrainedConfig) -> Linears:
    model, body, loaded_body = whole_on_meta(config)
    head = model.get_output_embeddings()
    shapes, head_name = {}, ""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            shapes[name] = (module.in_features, module.out_features)
        elif isinstance(module, Conv1D):
            shapes[name] = (module.weight.shape[0], module.weight.shape[1])
        if module is head:
            head_name = name
    return Linears(shapes, head_name, body, loaded_body)


def read_adapters(paths: Mapping[str, str], config: PreTrainedConfig) -> tuple[Adapter, ...]:
    """Find and check the adapters of ``model.adapters``, in order.

    Args:
        paths: folder or hub id of each adapter, keyed by the adapter's name.

    Raises:
        ModelError: an adapter is missing, is not supported, or belongs to another model.
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
        raise ModelError(f"{key}: {folder} is not an adapter: it has no {_FILES[0]}")
    if not (folder / _FILES[1]).exists():
        names = sorted(path.name for path in folder.glob("adapter_model*"))
        what = f"only {names[0]}, which can run code when loaded" if names else "no weights"
        raise ModelError(f"{key}: {folder} has {what}; save it with peft as {_FILES[1]}")
    try:
        return Adapter(name, folder / _FILES[1], _targets(folder, LoraConfig(values), linears))
    except NotSupportedError as error:
        raise ModelError(f"{key}: {folder}/{_FILES[0]}: {error}") from None
    except _NotOfThisModelError as error:
        raise ModelError(
            f"{key}: {folder} is not an adapter of this model: {error}",
            hint="use the adapter with the model that it was trained on",
        ) from None


class _NotOfThisModelError(Exception):
    """An adapter's weights do not fit the model."""


def _targets(folder: Path, config: LoraConfig, linears: Linears) -> tuple[Target, ...]:
    path = folder / _FILES[1]
    dtypes, shapes = check_file(path), _shapes(path)
    factors: dict[str, set[str]] = {}
    for tensor, dtype in dtypes.items():
        match = _FACTOR.fullmatch(tensor)
        if match is None or dtype not in _DTYPES:
            kind = f"is {dtype}" if match is not None else "is not a LoRA weight of a linear layer"
            raise NotSupportedError(
                f"{_FILES[1]} has {tensor}, which {kind} and is not supported"
                + (
                    ""
                    if "lora_" in tensor
                    else "; save the adapter with save_embedding_layers=False in peft"
                )
            )
        factors.setdefault(match.group(1), set()).add(match.group(2))
    targets = []
    for module in sorted(factors):
        if module not in linears.shapes:
            raise _NotOfThisModelError(f"the model has no linear layer {module}")
        if module == linears.head or _ROUTED.search(module):
            what = "the output head" if module == linears.head else "an expert"
            raise NotSupportedError(f"it changes {what} ({module}), which is not supported")
        if len(factors[module]) < 2:
            raise NotSupportedError(f"{_FILES[1]} has only one of the two factors of {module}")
        rank, (wide_in, wide_out) = config.rank(module), linears.shapes[module]
        for factor, wanted in (("A", (rank, wide_in)), ("B", (wide_out, rank))):
            tensor = f"{_PREFIX}{module}.lora_{factor}.weight"
            if shapes[tensor] != wanted:
                shape = " x ".join(map(str, shapes[tensor]))
                expected = " x ".join(map(str, wanted))
                raise _NotOfThisModelError(f"{tensor} is {shape}, but it should be {expected}")
        loaded_name, scale = linears.loaded_name(module), config.scale(module)
        targets.append(Target(module, loaded_name, rank, scale, wide_in, wide_out))
    _check_named(set(factors), set(config.targets(linears.shapes, linears.head)))
    return tuple(targets)


def _check_named(saved: set[str], named: set[str]) -> None:
    """Check that the file has factors for the layers that the configuration names, and for no other
    layers."""
    if not saved:
        raise NotSupportedError(f"{_FILES[1]} has no factors")
    if extra := sorted(saved - named):
        raise NotSupportedError(
            f"target_modules does not name {extra[0]}, whose factors are in the file"
        )
    if missing := sorted(named - saved):
        raise NotSupportedError(f"target_modules names {missing[0]}, whose factors are missing")


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged ({error}); fetch the adapter again") from error
