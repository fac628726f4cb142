"""Reads files that a job file refers to: engine presets, chat templates, tools."""

from __future__ import annotations

import json
import os.path
from importlib import resources
from pathlib import Path
from typing import Any

from batchinfer.console.format import first_line, listed, near_name, near_path, printable
from batchinfer.errors import UsageError
from batchinfer.job.spec.yaml import YamlText, parse_yaml, read_yaml

_SUFFIX = ".yaml"
_TOOL = '{"type": "function", "function": {"name": ...}}'


def chat_template_file(chat_template: str) -> str | None:
    """Read the file that ``prompt.chat_template`` names; return None for auto and none. Raise
    UsageError if the file cannot be read."""
    if chat_template in ("auto", "none"):
        return None
    try:
        return text_of(chat_template)
    except ValueError as error:
        raise UsageError(f"prompt.chat_template: {error}") from None


def tools_file(path: str) -> tuple[Any, ...]:
    """Read the tools from the JSON file that ``prompt.tools`` names. Raise ValueError if the file
    cannot be read, or is not a list of objects."""
    where = printable(path, 200)
    text = text_of(path).removeprefix("\ufeff")
    try:
        tools = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {first_line(error)}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{where} must hold a list of tools, each like {_TOOL}")
    return tuple(tools)


def text_of(path: str) -> str:
    """Read a text file; raise ValueError if it is missing or not UTF-8."""
    where = printable(path, 200)
    if not os.path.isfile(path):  # opening a pipe would block
        raise ValueError(f"there is no file {where}{near_path(path)}")
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not a UTF-8 text file; save it as UTF-8") from None


def shipped_presets() -> tuple[str, ...]:
    """List the names of the presets in the package, sorted."""
    names = (entry.name for entry in (resources.files("batchinfer") / "configs").iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def read_preset(preset: str, base_dir: Path) -> tuple[YamlText, str]:
    """Read a preset; return its keys, and the name that messages use for it.

    Args:
        preset: the name of a shipped preset, or a file relative to ``base_dir``.

    Raises:
        UsageError: the preset does not exist, or does not consist of keys and values.
    """
    source = f"engine preset {printable(preset, 80)}"
    if preset in shipped_presets():
        file = resources.files("batchinfer") / "configs" / f"{preset}{_SUFFIX}"
        text = parse_yaml(file.read_text(encoding="utf-8"), source)
    elif os.path.isfile(base_dir / preset):  # Path.is_file raises for invalid names
        text = read_yaml(base_dir / preset, source)
    else:
        near = near_name(preset, shipped_presets()) or ";"
        raise UsageError(
            f"engine.preset: {printable(preset, 80)} is neither a shipped preset "
            f"nor a file{near} the shipped presets are: {listed(shipped_presets())}"
        )
    if not isinstance(text.data, dict):
        raise UsageError(
            f"{source}: a preset must consist of keys and values of the engine section"
        )
    return text, source
