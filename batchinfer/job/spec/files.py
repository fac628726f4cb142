"""Files that a job names beside its data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from batchinfer.console.format import first_line, near_path, printable
from batchinfer.errors import UsageError

_TOOL = '{"type": "function", "function": {"name": ...}}'


def chat_template_file(chat_template: str) -> str | None:
    """The content of the file that ``prompt.chat_template`` names; None where it names none.

    Raises:
        UsageError: it cannot be read.
    """
    if chat_template in ("auto", "none"):
        return None
    try:
        return text_of(chat_template)
    except ValueError as error:
        raise UsageError(f"prompt.chat_template: {error}") from None


def tools_file(path: str) -> tuple[Any, ...]:
    """The tools in the JSON file that ``prompt.tools`` names.

    Raises:
        ValueError: it cannot be read, or holds no list of objects.
    """
    where = printable(path, 200)
    text = text_of(path).removeprefix("\ufeff")
    try:
        tools = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {first_line(error)}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deep") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{where} must hold a list of tools, {_TOOL} each")
    return tuple(tools)


def text_of(path: str) -> str:
    """The text of a file that a job names.

    Raises:
        ValueError: there is none, or it is not UTF-8 text.
    """
    where = printable(path, 200)
    if not os.path.isfile(path):  # opening a pipe would wait for a writer
        raise ValueError(f"there is no file {where}{near_path(path)}")
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not UTF-8 text; save it as such") from None
