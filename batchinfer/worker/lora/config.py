"""An adapter_config.json: which layers the adapter changes, and by how much.

Names match as in peft (peft/tuners/tuners_utils.py, peft/utils/other.py). The folder
may come from anywhere: patterns in it are matched with a time limit.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import regex

_MATCH_SECONDS = 1.0
_BASE_KEPT = frozenset({"gaussian", "eva", "orthogonal"})
"""Initializations that leave the base model's weights as they are."""
_OF_TRAINING = frozenset(
    [
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
        *("revision", "inference_mode", "lora_dropout", "megatron_core", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        "ensure_weight_tying",
    ]
)
"""Keys that do not affect what a finished adapter computes."""
_UNDERSTOOD = frozenset(
    [
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        "init_lora_weights",
    ]
)


class NotSupportedError(Exception):
    """The adapter needs something that is not supported, or contradicts itself."""


class LoraConfig:
    """A LoRA adapter's configuration, from the values of adapter_config.json.

    Raises:
        NotSupportedError: naming the key.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        kind = values.get("peft_type")
        if kind != "LORA":
            raise NotSupportedError(f"peft_type is {kind!r}; only LORA adapters can be run")
        for key in sorted(values.keys() - _OF_TRAINING - _UNDERSTOOD):
            value = values[key]
            if value not in (None, False, "none") and value != {} and value != []:
                raise NotSupportedError(f"{key} is set, which is not supported")
        start = values.get("init_lora_weights", True)
        if not (isinstance(start, bool) or (isinstance(start, str) and start in _BASE_KEPT)):
            raise NotSupportedError(
                f"init_lora_weights is {start!r}, which changes the base model's weights; "
                "convert the adapter (peft: path_initial_model_for_weight_conversion)"
            )
        self._values = values

    def rank(self, module: str) -> int:
        """Rank of a layer's factors."""
        rank = self._number(module, "rank_pattern", "r", 8)
        if not float(rank).is_integer() or rank < 1:
            raise NotSupportedError(f"a rank of {rank}; ranks are whole numbers from 1")
        return int(rank)

    def scale(self, module: str) -> float:
        """The factor that scales a layer's product."""
        alpha, rank = self._number(module, "alpha_pattern", "lora_alpha", 8), self.rank(module)
        return alpha / (math.sqrt(rank) if self._values.get("use_rslora") else rank)

    def targets(self, linears: Collection[str], head: str) -> Iterator[str]:
        """The ``linears`` of a model that the adapter was made for.

        Args:
            head: the output head, which all-linear leaves out.
        """
        wanted = self._values.get("target_modules")
        excluded = self._values.get("exclude_modules")
        for name in linears:
            if wanted == "all-linear":
                found = name != head
            else:
                found = self._names(wanted, name) and self._in_layers(name)
            if found and not self._names(excluded, name):
                yield name

    def _names(self, wanted: Any, name: str) -> bool:
        """Whether a pattern for the whole name, or a list of its ends, names a layer."""
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
            found = _match_with_timeout(rf".*\.{pattern}\.(\d+)\.", name)
            if found is not None:
                at = int(found.group(found.re.groups))
                return at in (indices if isinstance(indices, list) else [indices])
        return False

    def _number(self, module: str, patterns: str, default: str, otherwise: int) -> float:
        """A layer's number, by the first pattern that its name ends in; else the adapter's."""
        number: Any = self._values.get(default, otherwise)
        by_pattern = self._values.get(patterns) or {}
        if not isinstance(by_pattern, Mapping):
            raise NotSupportedError(f"{patterns} must be numbers by pattern")
        for pattern, value in by_pattern.items():
            if _match_with_timeout(rf"(.*\.)?({pattern})$", module) is not None:
                number = value
                break
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not abs(number) <= sys.float_info.max:
            raise NotSupportedError(
                f"{default} or {patterns} holds {number!r:.40}, which is not a number, or too large"
            )
        return float(number)


def _match_with_timeout(pattern: str, name: str) -> Any:
    try:
        return regex.match(pattern, name, timeout=_MATCH_SECONDS)
    except TimeoutError:
        raise NotSupportedError(f"the pattern {pattern!r} takes too long to match") from None
    except regex.error as error:
        raise NotSupportedError(f"the pattern {pattern!r} is invalid: {error}") from None
