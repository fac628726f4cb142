"""Reads and checks values of ``quantization_config`` in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.errors import ModelError

_MAX_SHOWN = 60


def one_of(saved: Mapping[str, Any], key: str, known: tuple[Any, ...], default: Any = None) -> Any:
    """Return the value of a key, which must be one of ``known``.

    Args:
        saved: ``quantization_config``, or an object in it.
        key: path of the key from ``quantization_config``, for messages. Only the last part is
            looked up in ``saved``.
        default: value of a missing key.

    Raises:
        ModelError: the value is not supported. The message names the key and the known values.
    """
    value = saved.get(key.rpartition(".")[2], default)
    if not any(type(value) is type(each) and value == each for each in known):
        raise refused(key, value, f"supported: {', '.join(map(str, known))}")
    return value


def group_size(saved: Mapping[str, Any], key: str = "group_size") -> int | None:
    """Return the number of inputs that share a scale, or None for all inputs.

    Raises:
        ModelError: the value is invalid. The message names the key.
    """
    value = saved.get("group_size")
    if value in (None, -1):
        return None
    if type(value) is not int or value < 1:
        raise refused(
            key, value, "it must be the number of inputs in a group, or -1 for all inputs"
        )
    return value


def block_of(saved: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Return the numbers of rows and columns of a block, or None if the key is null or missing.

    Raises:
        ModelError: the value is invalid. The message names the key.
    """
    value = saved.get(key.rpartition(".")[2])
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise refused(key, value, "it must be the numbers of rows and columns of a block")
    return sizes[0], sizes[1]


def refused(key: str, value: object, why: str) -> ModelError:
    shown = str(value)
    shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
    return ModelError(
        f"quantization_config.{key} in config.json is {shown}; {why}; this checkpoint is not "
        "yet supported; use the original checkpoint, or a checkpoint in a supported format"
    )
