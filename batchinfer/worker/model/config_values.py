"""Checks the values of a config.json before a model is built from them.

The values determine how long loops run and how much memory is allocated, so this module limits the
values. The limits are far above the sizes of real models. transformers checks everything else, and
so does the comparison with the shapes of the weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from batchinfer.engine.kv.layout import KVLayout

MAX_DEPTH = 32
"""Largest depth of nested objects and lists; published configs have at most six levels."""
MAX_POSITIONS = 2**31 - 1
"""Largest number of positions, because positions are computed as 32-bit integers."""

_POSITIVE = frozenset(
    [
        *("hidden_size", "n_embd", "d_model", "head_dim", "vocab_size"),
        *("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
        *("num_attention_heads", "n_head", "num_heads", "n_heads"),
        *("num_key_value_heads", "num_kv_heads", "n_head_kv"),
        *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"),
    ]
)
"""Keys whose numbers are 1 or more in every model."""
_POSITIONS = frozenset({"max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"})
_LAYERS = frozenset({"num_hidden_layers", "n_layer", "num_layers", "n_layers"})
_MAX_LAYERS = 2048
_EXPERTS = re.compile(r"(num|n)_\w*experts")
_MAX_EXPERTS = 1 << 14
_SIZES = re.compile(r"(num|n)_\w+|\w+_(size|dim|rank|heads|layers|embd|inner)|d_\w+")
_MAX_SIZE = 1 << 24
_ROPE = ("rope_parameters", "rope_scaling")
_ROPE_NUMBERS = ("rope_theta", "rope_local_base_freq", "partial_rotary_factor", "factor")
_OBJECTS = ("text_config", *_ROPE, "quantization_config")
_STRINGS = ("model_type", "dtype", "torch_dtype")
_LISTS = ("layer_types", "layers_block_type", "architectures")


class BadValueError(Exception):
    """The message names the config key with the invalid value."""


def readable(text: object, most: int = 300) -> str:
    """Return text from a file or library on one printable line of at most ``most`` characters."""
    line = " ".join(str(text).split())
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= most else f"{line[:most]}..."


def check_values(config: Mapping[str, Any]) -> None:
    """Check the values of a config.json and of its ``text_config``. Raise BadValueError for an
    invalid value."""
    _check_depth(config)
    for key, value in config.items():
        _check_kind(key, value)
        if type(value) is int:
            _check_size(key, value)
        if key in _ROPE and value:
            _check_rope(key, value)
    nested = config.get("text_config")
    if nested:
        check_values(nested)


def check_derived(num_heads: int, layout: KVLayout, num_positions: int | None) -> None:
    """Check numbers that depend on several values: query heads, KV layout, longest sequence. The
    message of BadValueError names the keys that determine an invalid number."""
    if layout.attention_layers:
        _check_heads(num_heads, layout)
    if num_positions is not None and num_positions > MAX_POSITIONS:
        raise BadValueError(
            f"rope_parameters.factor results in {num_positions} positions; at most "
            f"{MAX_POSITIONS:,} are supported"
        )


def _check_heads(num_heads: int, layout: KVLayout) -> None:
    if min(layout.num_kv_heads, layout.key_width, layout.value_width) < 1:
        raise BadValueError(
            f"hidden_size, num_attention_heads and num_key_value_heads result in "
            f"{layout.num_kv_heads} KV heads of {layout.key_width} elements; set head_dim"
        )
    if num_heads % layout.num_kv_heads:
        raise BadValueError(
            f"num_attention_heads is {num_heads}; it must be a multiple of num_key_value_heads, "
            f"which is {layout.num_kv_heads}"
        )


def _is_whole(value: Any) -> bool:
    # A list has a number for each layer; ``KVLayout`` checks its length.
    return all(type(number) is int for number in (value if isinstance(value, list) else [value]))


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_KINDS: tuple[tuple[Collection[str], Callable[[Any], bool], str], ...] = (
    (_POSITIVE | _POSITIONS, _is_whole, "a whole number"),
    (_OBJECTS, lambda value: isinstance(value, Mapping), "an object, or null"),
    (_STRINGS, lambda value: isinstance(value, str), "a string, or null"),
    (_ROPE_NUMBERS, lambda value: not isinstance(value, str), "a number"),
    (_LISTS, _is_list_of_strings, "a list of strings, or null"),
)
"""Triples (keys, function that checks a value, description of valid values)."""


def _check_kind(key: str, value: Any) -> None:
    for keys, is_valid, expected in _KINDS:
        if value is not None and key in keys and not is_valid(value):
            raise BadValueError(f"{key} is {_shown(value)}; it must be {expected}")


def _check_rope(name: str, values: Mapping[str, Any]) -> None:
    """Check the parameters of rotary positions. Some configs have separate parameters for each
    layer type."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            _check_rope(f"{name}.{key}", value)
        elif key in _ROPE_NUMBERS and type(value) not in (int, float, type(None)):
            raise BadValueError(f"{name}.{key} is {_shown(value)}; it must be a number")


def _check_size(key: str, value: int) -> None:
    if key in _POSITIVE | _POSITIONS and value < 1:
        raise BadValueError(f"{key} is {value}; it must be 1 or more")
    bounds = (
        (key in _POSITIONS, MAX_POSITIONS),
        (key in _LAYERS, _MAX_LAYERS),
        (_EXPERTS.fullmatch(key), _MAX_EXPERTS),
        (_SIZES.fullmatch(key), _MAX_SIZE),
    )
    most = next((bound for applies, bound in bounds if applies), value)
    if value > most:
        raise BadValueError(f"{key} is {_shown(value)}; it must be at most {most:,}")


def _check_depth(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        level = [value]
        for _ in range(MAX_DEPTH):
            level = [inner for outer in level for inner in _inside(outer)]
        if level:
            raise BadValueError(f"{key} is nested more than {MAX_DEPTH} levels deep")


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
