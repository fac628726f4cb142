"""Reads and checks the tools of a row, and makes grammars of answers that must call a tool."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchinfer.config import PromptConfig
from batchinfer.config.settings_base import format_value
from batchinfer.errors import RowError
from batchinfer.text.tools.tool_format import ToolFormat, Tools

if TYPE_CHECKING:
    from batchinfer.text.tokenizer import Tokenizer

Choice = str | Mapping[str, Any]
"""``auto``, ``none``, ``required``, or ``{type: function, function: {name: text}}``."""
_NAME = re.compile(r"[\w.-]{1,128}")


@dataclass(frozen=True, slots=True)
class RowTools:
    """Tools that a row may call, and the row's ``tool_choice``."""

    tools: Tools
    choice: Choice = "auto"
    several: bool = True
    """True if an answer may have several calls."""

    @property
    def key(self) -> str:
        return json.dumps([list(self.tools), self.choice, self.several], ensure_ascii=False)

    def grammar(self, tools_as: ToolFormat, tokenizer: Tokenizer) -> str | None:
        """Return a grammar (Lark) for the answer; None if the answer is not constrained.

        Raises:
            ValueError: calls in this format have no grammar.
        """
        if self.choice == "auto":
            return None
        wanted, name = self.tools, None
        if not isinstance(self.choice, str):
            name = str(self.choice["function"]["name"])
            wanted = [tool for tool in self.tools if tool["function"]["name"] == name]
        lark = tools_as.grammar(wanted, tokenizer, several=self.several and name is None)
        if lark is None:
            raise ValueError(
                f"tool_choice {format_value(self.choice)} with this model's tool-call "
                "format is not yet supported by this version; use tool_choice auto"
            )
        return lark


def checked_choice(value: object, tools: Tools) -> Choice:
    """Return ``value``; raise ValueError if it is invalid or names no tool in ``tools``."""
    if value in ("auto", "none", "required"):
        return str(value)
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(value, Mapping) or value.get("type") != "function" or name is None:
        raise ValueError(
            f"tool_choice is {format_value(value)}; it must be auto, none, required or "
            "{type: function, function: {name: ...}}"
        )
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        known = ", ".join(names)
        raise ValueError(f"tool_choice names {format_value(name)}; the tools are: {known}")
    return {"type": "function", "function": {"name": name}}


def checked_tools(value: object) -> Tools:
    """Return the definitions of tools.

    Args:
        value: a list of OpenAI's definitions, or its JSON text; null fields are dropped.

    Raises:
        ValueError: a definition is invalid, or two definitions have the same name.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"tools are not JSON: {error}") from None
    if not isinstance(value, list | tuple):
        raise ValueError(f"tools are {format_value(value)}; they must be a list")
    tools = [_checked(tool, at) for at, tool in enumerate(value)]
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two tools have the name {name}; rename one")
    return tools


def _checked(value: object, at: int) -> Mapping[str, Any]:
    tool = _plain(value)
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise ValueError(f"tools[{at}] is not {{type: function, function: {{name: ...}}}}")
    name, parameters = function.get("name"), function.get("parameters", {})
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"tools[{at}] has the name {format_value(name)}; a name must have 1 to 128 letters, "
            "digits, dots, hyphens or underscores"
        )
    if isinstance(parameters, str):  # columns of structs contain schemas as JSON text
        parameters = json.loads(parameters)
    if not isinstance(parameters, Mapping):
        raise ValueError(f"tools[{at}]: parameters must be a JSON schema, which is an object")
    known = {"parameters": parameters} if parameters else {}
    return {"type": "function", **tool, "function": {**function, **known}}


def _plain(value: Any) -> Any:
    """Convert a cell to JSON data: decode strings and drop null fields."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def row_tools(value: object, choice: object, where: str) -> RowTools | None:
    """Return the tools of a row; None without tools, or with the choice ``none``.

    Raises:
        RowError: ``unsupported_content``.
    """
    if value is None or value in ("", b""):  # an empty cell in CSV
        return None
    if isinstance(value, RowError):
        raise value
    try:
        tools = checked_tools(value.decode() if isinstance(value, bytes) else value)
        chosen = checked_choice("auto" if choice is None else choice, tools)
    except (ValueError, RecursionError) as error:
        raise RowError("unsupported_content", f"{where}: {error}") from None
    return RowTools(tools, chosen) if tools and chosen != "none" else None


class RowToolsReader:
    """Reads the tools of rows as the job's ``prompt`` section says."""

    def __init__(self, config: PromptConfig) -> None:
        self.column = config.tools_column
        self._choice = config.tool_choice
        self._all = row_tools(config.tools, config.tool_choice, "prompt.tools")

    def of(self, row: Mapping[str, object]) -> RowTools | None:
        """Return the tools of a row; None without tools, or with the choice ``none``.

        Raises:
            RowError: ``unsupported_content``: the row's tools are invalid.
        """
        if self.column is None:
            return self._all
        return row_tools(row.get(self.column), self._choice, f"column {self.column}")
