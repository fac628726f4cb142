"""Random changes to valid model folders, which make them broken or hostile."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models import make_checkpoint, make_text_model

BASES = ("llama", "gemma2", "qwen3_moe", "gpt2", "deepseek_v3", "gpt_oss", "phi3", "mixtral")
_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_JSON_FILES = (_CONFIG, *_TOKENIZER_FILES, "generation_config.json", _INDEX)
_DEPTHS = (40, 900, 20_000, 100_000)
_KEYS = (
    *("sliding_window", "layer_types", "rope_scaling", "rope_parameters", "quantization_config"),
    *("text_config", "auto_map", "num_local_experts", "num_experts_per_tok", "first_k_dense"),
    *("is_encoder_decoder", "attention_bias", "torch_dtype", "dtype", "alibi", "index_topk"),
    *("max_position_embeddings", "vocab_size", "num_key_value_heads", "architectures", "n_layer"),
)
"""Keys that are added to a config."""
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 5, 7, -1, 12, 64, 1000, 10**6, 10**8, 2**31, 10**15, 2**63),
    *(10**40, 0.0, -1.5, 0.1, 1.0, 2.5, 1e300, float("nan"), float("inf"), "", "x", "1", "llama"),
    *("float64", "int8", "../x", "\u202e\0\x1b[31m", "a" * 5000, [], [0], ["x"], [[]], {}),
    *({"x": 1}, {"rope_type": "yarn"}, {"rope_type": "linear", "factor": 0}, {"type": "dynamic"}),
    *({"rope_type": "yarn", "factor": 1e300, "original_max_position_embeddings": 512}, [1] * 200),
    *(["sliding_attention"] * 3, ["full_attention", "mamba", 3], {"quant_method": "gptq"}),
)

Mutation = tuple[str, str]
"""The changed file, and for a config the changed key, else ""."""


def make_base(folder: Path, family: str, at: int) -> Path:
    """Write a valid model folder with a tokenizer; if ``at`` is odd, with two files of weights."""
    make_text_model(folder)
    if family != "llama":
        make_checkpoint(family, folder, vocab_size=259, bos_token_id=0, eos_token_id=2)
    if at % 2:
        _split(folder)
    return folder


def _split(folder: Path) -> None:
    tensors = load_file(folder / _WEIGHTS)
    names = sorted(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    weight_map = {}
    for at, half in enumerate(halves, start=1):
        file = f"model-{at:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(half, file)
    (folder / _WEIGHTS).unlink()
    _write(folder / _INDEX, {"metadata": {}, "weight_map": weight_map})


def mutate(folder: Path, random: Random) -> Mutation:
    """Change a model folder at random; return the change."""
    makers: list[Callable[[Path, Random], Mutation]] = [_config_value] * 12
    makers += [_config_key] * 3 + [_json_value] * 3 + [_text, _deep, _no_file, _other_kind] * 2
    makers += [_header] * 4 + [_cut, _bytes_changed, _tensor, _shards] * 2
    return random.choice(makers)(folder, random)


def _config_value(folder: Path, random: Random) -> Mutation:
    config = _read(folder / _CONFIG)
    path = random.choice(_paths(config))
    _holder(config, path)[path[-1]] = _value(random, _holder(config, path)[path[-1]])
    _write(folder / _CONFIG, config)
    return _CONFIG, str(path[0])


def _config_key(folder: Path, random: Random) -> Mutation:
    config = _read(folder / _CONFIG)
    key = random.choice([*config, *_KEYS, *_KEYS])
    if key in config and random.random() < 0.5:
        del config[key]
    else:
        config[key] = _value(random, config.get(key))
    _write(folder / _CONFIG, config)
    return _CONFIG, key


def _json_value(folder: Path, random: Random) -> Mutation:
    path = folder / random.choice([name for name in _JSON_FILES if (folder / name).exists()])
    content = _read(path)
    place = random.choice(_paths(content))
    holder = _holder(content, place)
    if random.random() < 0.3:
        del holder[place[-1]]
    else:
        holder[place[-1]] = _value(random, holder[place[-1]])
    _write(path, content)
    return path.name, ""


def _text(folder: Path, random: Random) -> Mutation:
    path = folder / random.choice([name for name in _JSON_FILES if (folder / name).exists()])
    raw = path.read_bytes()
    at = random.randrange(len(raw))
    cut = [raw[:at], raw[at:], raw[:at] + random.randbytes(3) + raw[at + 3 :]]
    added = [b"\xff\xfe" + raw, b"\xef\xbb\xbf" + raw, raw + b"{}"]
    raw = random.choice([*cut, *added, b"", b"null", b"[]", b"1" * 5000, b"NaN"])
    path.write_bytes(raw)
    return path.name, ""


def _deep(folder: Path, random: Random) -> Mutation:
    path = folder / random.choice([name for name in _JSON_FILES if (folder / name).exists()])
    depth, (left, right) = random.choice(_DEPTHS), random.choice([("[", "]"), ('{"a":', "}")])
    nested = f"{left * depth}1{right * depth}" if random.random() < 0.8 else left * depth
    raw = path.read_text()
    path.write_text(random.choice([f'{{"x": {nested}, {raw.lstrip()[1:]}', nested]))
    return path.name, ""


def _no_file(folder: Path, random: Random) -> Mutation:
    path = random.choice(sorted(folder.iterdir()))
    path.unlink()
    return path.name, ""


def _other_kind(folder: Path, random: Random) -> Mutation:
    path = random.choice(sorted(folder.iterdir()))
    path.unlink()
    kind = random.randrange(4)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    else:
        path.symlink_to(path if kind == 2 else "/dev/zero")
    return path.name, ""


def _header(folder: Path, random: Random) -> Mutation:
    """Change the header of a safetensors file, but not its data."""
    path = _weights(folder, random)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    what = random.randrange(6)
    if what == 0:
        depth = random.choice(_DEPTHS)
        text = '{"x":' + "[" * depth + "]" * depth + "}"
    elif what == 1:
        text = random.choice(["", "{", "[]", "null", '"x"', '{"x":{}}', " " * 100, '{"x":3}'])
    else:
        place = random.choice(_paths(header))
        _holder(header, place)[place[-1]] = _value(random, _holder(header, place)[place[-1]])
        text = json.dumps(header)
    claimed = len(text) if random.random() < 0.8 else random.choice([0, 1, 2**31, 2**63, length])
    path.write_bytes(struct.pack("<Q", claimed) + text.encode() + data)
    return path.name, ""


def _cut(folder: Path, random: Random) -> Mutation:
    path = _weights(folder, random)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(random.choice([0, 1, 7, 8, 9, size // 2, size - 1, size + 1, size + 10**9]))
    return path.name, ""


def _bytes_changed(folder: Path, random: Random) -> Mutation:
    path = _weights(folder, random)
    raw = bytearray(path.read_bytes())
    for _ in range(random.randrange(1, 20)):
        raw[random.randrange(min(len(raw), 4000))] = random.randrange(256)
    path.write_bytes(raw)
    return path.name, ""


def _tensor(folder: Path, random: Random) -> Mutation:
    """Remove or add a tensor, or change its shape or dtype."""
    path = _weights(folder, random)
    tensors = load_file(path)
    name = random.choice(sorted(tensors))
    what = random.randrange(5)
    if what == 0:
        del tensors[name]
    elif what == 1:
        tensors[random.choice(["x", f"{name}.scale", name + "x"])] = torch.zeros(3)
    elif what == 2:
        tensors[name] = torch.zeros(random.choice([(), (0,), (1,), (3, 3, 3), (1, 40_000)]))
    elif what == 3:
        kinds = (torch.int8, torch.bool, torch.float64, torch.int64, torch.float8_e4m3fn)
        tensors[name] = tensors[name].to(random.choice(kinds))
    else:
        tensors[name] = torch.full_like(tensors[name], random.choice([float("nan"), 1e38, 0.0]))
    save_file(tensors, path, {"format": "pt"})
    return path.name, ""


def _shards(folder: Path, random: Random) -> Mutation:
    """Change the file names in the index of the weights."""
    files = [*(path.name for path in folder.glob("*.safetensors")), *_JSON_FILES]
    files += ["../x.safetensors", "/dev/zero", "/etc/passwd", "", ".", "a\0b", "x" * 300]
    path = folder / _INDEX
    index = _read(path) if path.exists() else {"weight_map": {"model.norm.weight": _WEIGHTS}}
    for name in random.sample(sorted(index["weight_map"]), 1 if random.random() < 0.7 else 0):
        index["weight_map"][name] = random.choice(files)
    if random.random() < 0.3:
        shutil.copy(_weights(folder, random), folder / "model-00009-of-00009.safetensors")
    if random.random() < 0.2:
        index["weight_map"] = _value(random, index["weight_map"])
    _write(path, index)
    return _INDEX, ""


def _weights(folder: Path, random: Random) -> Path:
    return random.choice(sorted(folder.glob("*.safetensors")))


def _value(random: Random, old: Any) -> Any:
    """Return a value of any type; sometimes one close to ``old``."""
    if isinstance(old, int) and not isinstance(old, bool) and random.random() < 0.4:
        return random.choice([old + 1, old - 1, old * 2, old // 2, -old, old * 1000])
    if isinstance(old, list) and old and random.random() < 0.4:
        return random.choice([old[:-1], old * 2, [*old, None], list(reversed(old))])
    return random.choice(_VALUES)


def _paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of values; of long lists and objects, only the first and last ten."""
    items: list[tuple[Any, Any]] = []
    if isinstance(data, dict | list):
        items = list(data.items() if isinstance(data, dict) else enumerate(data))
    items = items if len(items) < 40 else [*items[:10], *items[-10:]]
    below = [place for key, value in items for place in _paths(value, (*path, key))]
    return [path, *below] if path else below


def _holder(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        data = data[key]
    return data


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))
