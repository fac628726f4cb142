"""Reads YAML 1.2 as plain data with the line of every key, within limits on size and depth.

ruamel.yaml composes the nodes. This module reads scalars according to the core schema of YAML 1.2.2
(section 10.3.2), so that ``1e-5`` is a number and ``no`` is a string. Aliases are expanded within
the limits.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from batchinfer.console.format import near_path, printable
from batchinfer.errors import UsageError

Scalar = str | int | float | bool | None
_T = TypeVar("_T")

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"(true|True|TRUE)|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_INTEGER_LIMIT = 2**64

MAX_BYTES = 256 * 1024
"""Maximum size of a file, in bytes."""
MAX_CHARACTERS = 2 * MAX_BYTES
"""Maximum total number of characters and nodes after aliases are expanded."""
MAX_DEPTH = 32
"""Maximum nesting depth of lists and mappings."""

_NO_TAG = Tag(suffix="none")
_QUOTES = 'needs quotes around it, as in "{{ column }}"'
# Message for ``template: {{ column }}``: in YAML, this is a mapping whose key is a mapping.
_PLAIN_KEY = f"a key must be plain text; a string that starts with a brace or bracket {_QUOTES}"
_REMEDIES = (
    (
        r"(found|got) '<scalar>'",
        "inside quotes, use the other kind of quotes, as in \"{{ row['a name'] }}\"",
    ),
    (r"got '\{'", f"a string with braces {_QUOTES}"),
    (r"found character '\\t'", "indent with spaces"),
    (r"found character '(.)'", rf"a string that starts with \1 {_QUOTES}"),
    ("found another document", "a job file must be a single document"),
    ("undefined alias", "a string that starts with * needs quotes"),
    (
        "mapping values are not allowed",
        "a string with a colon needs quotes, and keys of one section need the same indent",
    ),
    ("found '(<block mapping start>|-)'", "keys of one section need the same indent"),
    ("unexpected end of stream", "a quote is not closed"),
    ("got ':'", "an earlier brace or bracket is not closed"),
)
"""Patterns of the YAML parser's messages, each with advice to add to the message."""

KeyPath = tuple[str | int, ...]


def dotted(path: KeyPath) -> str:
    """Format a key path as in messages and ``--set``: ``sampling.stop[0]``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return printable(text.removeprefix("."), 120)


def plain_scalar(text: str) -> Scalar:
    """Convert an unquoted scalar to its value. Raise ValueError if a number is out of range, or if
    the text is not valid Unicode."""
    if _NULL.fullmatch(text):
        return None
    if match := _BOOL.fullmatch(text):
        return match.group(1) is not None
    if _INT.fullmatch(text):
        return _integer(text)
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"{text} cannot be used as a number here")
    if _FLOAT.fullmatch(text):
        number = float(text)
        if math.isinf(number):
            raise ValueError(f"{printable(text, 40)} is too large a number")
        return number
    return valid_text(text)


def valid_text(text: str) -> str:
    """Return ``text``; raise ValueError if it is not valid Unicode."""
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
    """A YAML text as plain Python data; keys are strings as written."""

    data: Any
    lines: Mapping[KeyPath, int]
    """Line number of each key and list item. Keys inside an alias have the lines of its anchor."""


def read_yaml(path: Path, source: str) -> YamlText:
    """Read the YAML file at ``path``. If the file is invalid, the UsageError names ``source`` and
    the line."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
            what = "a folder" if path.is_dir() else "a pipe, a socket or a device"
            raise UsageError(f"{source} cannot be read: it is {what}; give a file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        meant = near_path(path) if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"{source} cannot be read: {reason}{meant}") from None
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{source} is larger than {MAX_BYTES // 1024} KiB; is it a job file?")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{source}, line {line} is not UTF-8 text; save the file as UTF-8"
        ) from None
    return parse_yaml(text, source)


def parse_yaml(text: str, source: str) -> YamlText:
    """Parse a single YAML document; empty text is null. If the text is invalid, the UsageError
    names ``source`` and the line."""
    try:
        return _read(text, source)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = _with_remedy(printable(str(error.problem or error.context)))
        raise UsageError(f"{source}{line}: not valid YAML: {problem}") from None
    except ReaderError as error:
        place = f"{source}, line {text.count(chr(10), 0, error.position) + 1}"
        what = f"U+{error.character:04X}"
        raise UsageError(f"{place}: a text file cannot contain the character {what}") from None
    except RecursionError:
        raise UsageError(f"{source} is nested more than {MAX_DEPTH} levels deep") from None
    except YAMLError as error:
        raise UsageError(f"{source}: not valid YAML: {printable(str(error))}") from None


def _with_remedy(problem: str) -> str:
    """Add advice to the parser's ``problem`` if a pattern of ``_REMEDIES`` matches."""
    for pattern, remedy in _REMEDIES:
        if match := re.search(pattern, problem):
            return f"{problem}; {match.expand(remedy)}"
    return problem


class _NoTagResolver(VersionedResolver):
    """Resolves no tags, so that only explicitly tagged nodes have a tag."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Tag:
        return _NO_TAG


def _read(text: str, source: str) -> YamlText:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _NoTagResolver
    yaml.composer.warn_double_anchors = False
    root = yaml.compose(text)
    if root is None:
        return YamlText(None, {})
    reader = _NodeReader(source)
    if (version := yaml.doc_infos[-1].doc_version) is not None and version != (1, 2):
        raise reader.error(root, "only YAML 1.2 is supported; delete the %YAML line")
    return YamlText(reader.value(root, ()), reader.lines)


class _NodeReader:
    def __init__(self, source: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._source = source
        self._size = 0

    def value(self, node: Node, path: KeyPath) -> Any:
        """Convert ``node`` at ``path`` to plain data, with aliases expanded."""
        if node.ctag is not _NO_TAG:
            problem = (
                f"tags such as {printable(str(node.ctag), 40)} are not supported; leave the tag out"
            )
            raise self.error(node, problem)
        if isinstance(node, ScalarNode):
            return self._scalar(node, plain_scalar if node.style is None else valid_text, path)
        self._grow(node, 1)
        if len(path) >= MAX_DEPTH:
            raise self.error(node, f"the value is nested more than {MAX_DEPTH} levels deep")
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        assert isinstance(node, SequenceNode)
        items = []
        for index, item in enumerate(node.value):
            place = (*path, index)
            self.lines[place] = _line(item)
            items.append(self.value(item, place))
        return items

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode) or key_node.ctag is not _NO_TAG:
                raise self.error(key_node, _PLAIN_KEY)
            key = self._scalar(key_node, valid_text)
            place = (*path, key)
            if key in entries:
                first = self.lines[place]
                known = f"is already given on line {first}; keep one"
                raise self.error(key_node, f"{printable(key, 60)} {known}")
            self.lines[place] = _line(key_node)
            entries[key] = self.value(value_node, place)
        return entries

    def _scalar(self, node: ScalarNode, read: Callable[[str], _T], path: KeyPath = ()) -> _T:
        self._grow(node, 1 + len(node.value))
        try:
            return read(node.value)
        except ValueError as error:
            name = f"{dotted(path)}: " if path else ""
            raise self.error(node, f"{name}{error}") from None

    def _grow(self, node: Node, size: int) -> None:
        self._size += size
        if self._size > MAX_CHARACTERS:
            raise self.error(node, "the aliases expand to too much text")

    def error(self, node: Node, problem: str) -> UsageError:
        return UsageError(f"{self._source}, line {_line(node)}: {problem}")


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1
