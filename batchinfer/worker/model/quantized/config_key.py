"""Values of config.json's ``quantization_config``, and what is said of those that do not go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.errors import ModelError

SECTION = "quantization_config"
_MOST_SHOWN = 60


def one_of(saved: Mapping[str, Any], key: str, known: tuple[Any, ...], default: Any = None) -> Any:
    """The value of a key, one of those that can be read.

    Args:
        saved: the section, or an object in it.
        key: in ``saved``; dotted where that is an object in the section.
        known: values that can be read.
        default: where there is no such key.

    Raises:
        ModelError: naming the key and the values that can be read.
    """
    value = saved.get(key.rpartition(".")[2], default)
    if not any(type(value) is type(each) and value == each for each in known):
        raise refused(key, value, f"{_listed(known)} can be read")
    return value


def group_size(saved: Mapping[str, Any], key: str = "group_size") -> int | None:
    """Inputs that share a scale; None: all of them.

    Raises:
        ModelError: naming the key.
    """
    value = saved.get("group_size")
    if value in (None, -1):
        return None
    if type(value) is not int or value < 1:
        raise refused(key, value, "it must be a number of inputs, or -1 for all of them")
    return value


def block_of(saved: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None where the key is null.

    Raises:
        ModelError: naming the key.
    """
    value = saved.get(key.rpartition(".")[2])
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise refused(key, value, "it must be the rows and the columns of a block")
    return sizes[0], sizes[1]


def refused(key: str, value: object, why: str) -> ModelError:
    """The error for a value that cannot be read."""
    shown = str(value)
    shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
    return ModelError(
        f"not yet: {SECTION}.{key} in config.json is {shown}; {why}; use the checkpoint it was "
        "made from, or one quantized in a way that is read"
    )


def _listed(values: tuple[Any, ...]) -> str:
    names = [str(value) for value in values]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
