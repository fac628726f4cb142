"""YAML 1.2 as plain data, with the line of every key, and bounded whatever the text says.

Built on ruamel.yaml's event stream, because events know their lines and need no recursion: the
limits below hold before anything large is made. What a plain scalar means is the core schema of
YAML 1.2.2 (section 10.3.2): ``1e-5`` is a number, ``no`` is a text.
"""

from __future__ import annotations

import copy
import math
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
    StreamStartEvent,
)
from ruamel.yaml.reader import ReaderError

from batchinfer.console.format import near_path, printable
from batchinfer.errors import UsageError
from batchinfer.job.spec.yaml_remedies import PLAIN_KEY, with_remedy

Scalar = str | int | float | bool | None

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"(true|True|TRUE)|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_INTEGER_LIMIT = 2**64

MAX_BYTES = 256 * 1024
"""Largest file read."""
MAX_CHARACTERS = 2 * MAX_BYTES
"""Most characters (and nodes) after aliases are written out."""
MAX_DEPTH = 32
"""Deepest nesting of lists and mappings."""

KeyPath = tuple[str | int, ...]
_T = TypeVar("_T")


def dotted(path: KeyPath) -> str:
    """A key path as messages and ``--set`` write it: ``sampling.stop[0]``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return printable(text.removeprefix("."), 120)


def plain_scalar(text: str) -> Scalar:
    """The value that ``text``, written without quotes, stands for.

    Raises:
        ValueError: saying what is wrong with it: a number out of range, or not valid Unicode.
    """
    if _NULL.fullmatch(text):
        return None
    if match := _BOOL.fullmatch(text):
        return match.group(1) is not None
    if _INT.fullmatch(text):
        return _integer(text)
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"{text} is not a number that can be used here")
    if _FLOAT.fullmatch(text):
        number = float(text)
        if math.isinf(number):
            raise ValueError(f"{printable(text, 40)} is too large a number")
        return number
    return valid_text(text)


def valid_text(text: str) -> str:
    """``text`` itself.

    Raises:
        ValueError: it is not valid Unicode.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{printable(text, 40)} is not valid Unicode") from None
    return text


def _integer(text: str) -> int:
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    digits = text if base == 10 else text[2:]
    # The length check also keeps int() within Python's limit on digits.
    number = int(digits, base) if len(digits) <= 40 else _INTEGER_LIMIT
    if abs(number) >= _INTEGER_LIMIT:
        raise ValueError(f"{printable(text, 40)} is too large a number")
    return number


@dataclass(frozen=True)
class YamlText:
    """Data of a YAML text: keys are texts as written, values are plain Python data."""

    data: Any
    lines: Mapping[KeyPath, int]
    """Line, from 1, of each key and list item; what an alias stands for has no lines of its own."""


def read_yaml(path: Path, source: str) -> YamlText:
    """The YAML file at ``path``.

    Raises:
        UsageError: naming ``source``, and the line where there is one.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
            what = "a folder" if path.is_dir() else "a pipe, a socket or a device"
            raise UsageError(f"{source}: cannot be read: it is {what}; give a file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        meant = near_path(path) if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"{source}: cannot be read: {reason}{meant}") from None
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{source}: larger than {MAX_BYTES // 1024} KiB; is it a job file?")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{source}, line {line}: not UTF-8 text; save it as UTF-8") from None
    return parse_yaml(text, source)


def parse_yaml(text: str, source: str) -> YamlText:
    """The one YAML document in ``text``; an empty text is null.

    Raises:
        UsageError: naming ``source`` and the line.
    """
    try:
        return _Builder(text, source).build()
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = with_remedy(printable(str(error.problem or error.context)))
        raise UsageError(f"{source}{line}: not valid YAML: {problem}") from None
    except ReaderError as error:
        place = f"{source}, line {text.count(chr(10), 0, error.position) + 1}"
        what = f"U+{error.character:04X}"
        raise UsageError(f"{place}: a text file does not hold the character {what}") from None
    except YAMLError as error:
        raise UsageError(f"{source}: not valid YAML: {printable(str(error))}") from None


@dataclass(frozen=True)
class _Node:
    value: Any
    size: int
    """Characters and nodes, aliases written out."""
    height: int
    """Levels of lists and mappings in it."""


class _Builder:
    """Parser events to data; a method per kind of node, nested at most MAX_DEPTH deep."""

    def __init__(self, text: str, source: str) -> None:
        self._events: Iterator[Any] = iter(YAML(typ="safe", pure=True).parse(text))
        self._source = source
        self._anchors: dict[str, _Node] = {}
        self._lines: dict[KeyPath, int] = {}
        self._size = 0

    def build(self) -> YamlText:
        event = next(self._events)
        assert isinstance(event, StreamStartEvent)
        start = next(self._events)
        if isinstance(start, StreamEndEvent):
            return YamlText(None, {})
        if start.version not in (None, (1, 2)):
            raise self._error(start, "only YAML 1.2 is read; drop the %YAML line")
        node = self._node(next(self._events), ())
        next(self._events)  # the document's end
        after = next(self._events)
        if isinstance(after, DocumentStartEvent):
            raise self._error(after, "a second document starts here; one is expected")
        return YamlText(node.value, self._lines)

    def _node(self, event: NodeEvent, path: KeyPath) -> _Node:
        if isinstance(event, AliasEvent):
            return self._alias(event, path)
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise self._error(
                event, f"tags such as {printable(str(tag), 40)} are not read; leave it out"
            )
        if isinstance(event, ScalarEvent):
            node = self._scalar(event, path)
        elif len(path) >= MAX_DEPTH:
            raise self._error(event, f"nested more than {MAX_DEPTH} deep")
        elif isinstance(event, SequenceStartEvent):
            node = self._sequence(path)
        else:
            assert isinstance(event, MappingStartEvent)
            node = self._mapping(path)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _alias(self, event: AliasEvent, path: KeyPath) -> _Node:
        node = self._anchors.get(event.anchor)
        if node is None:
            name = printable(event.anchor, 40)
            problem = f"*{name} stands for nothing above it; a text that starts with * needs quotes"
            raise self._error(event, problem)
        if len(path) + node.height > MAX_DEPTH:
            raise self._error(event, f"nested more than {MAX_DEPTH} deep")
        self._grow(event, node.size)
        return _Node(copy.deepcopy(node.value), node.size, node.height)

    def _sequence(self, path: KeyPath) -> _Node:
        items: list[_Node] = []
        while not isinstance(event := next(self._events), SequenceEndEvent):
            place = (*path, len(items))
            self._lines[place] = event.start_mark.line + 1
            items.append(self._node(event, place))
        return self._collection([item.value for item in items], items)

    def _mapping(self, path: KeyPath) -> _Node:
        entries: dict[str, _Node] = {}
        while not isinstance(event := next(self._events), MappingEndEvent):
            key = self._key(event)
            place = (*path, key)
            if key in entries:
                first = self._lines[place]
                raise self._error(
                    event, f"{printable(key, 60)} is already given on line {first}; keep one"
                )
            self._lines[place] = event.start_mark.line + 1
            entries[key] = self._node(next(self._events), place)
        return self._collection({k: node.value for k, node in entries.items()}, entries.values())

    def _collection(self, value: Any, nodes: Any) -> _Node:
        size = 1 + sum(node.size for node in nodes)
        return _Node(value, size, 1 + max((node.height for node in nodes), default=0))

    def _key(self, event: NodeEvent) -> str:
        if not isinstance(event, ScalarEvent) or event.tag is not None:
            raise self._error(event, PLAIN_KEY)
        self._grow(event, 1 + len(event.value))
        return self._value(event, valid_text)

    def _scalar(self, event: ScalarEvent, path: KeyPath) -> _Node:
        size = 1 + len(event.value)
        self._grow(event, size)
        read: Callable[[str], Scalar] = plain_scalar if event.implicit[0] else valid_text
        return _Node(self._value(event, read, path), size, 0)

    def _value(self, event: ScalarEvent, read: Callable[[str], _T], path: KeyPath = ()) -> _T:
        try:
            return read(event.value)
        except ValueError as error:
            name = f"{dotted(path)}: " if path else ""
            raise self._error(event, f"{name}{error}") from None

    def _grow(self, event: NodeEvent, size: int) -> None:
        self._size += size
        if self._size > MAX_CHARACTERS:
            raise self._error(event, "aliases stand for too much text")

    def _error(self, event: Any, problem: str) -> UsageError:
        return UsageError(f"{self._source}, line {event.start_mark.line + 1}: {problem}")
