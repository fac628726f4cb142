"""YAML 1.2 as plain data, with the line of every key, and bounded whatever the text says.

ruamel.yaml composes the nodes, which know their lines. Their values are read here: a plain scalar
means what the core schema of YAML 1.2.2 (section 10.3.2) says, so that ``1e-5`` is a number and
``no`` a string, and aliases are written out within the limits below.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from batchinfer.console.format import near_path, printable
from batchinfer.errors import UsageError

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

_NO_TAG = Tag(suffix="none")
_QUOTES = 'needs quotes around it, as in "{{ column }}"'
# Of ``template: {{ column }}``, which YAML takes for a mapping whose key is a mapping.
_PLAIN_KEY = f"a key must be plain text, and a string that starts with a brace or bracket {_QUOTES}"
_REMEDIES = (
    (r"(found|got) '<scalar>'", "inside quotes use the other kind: \"{{ row['a name'] }}\""),
    (r"got '\{'", f"a string with braces {_QUOTES}"),
    (r"found character '\\t'", "indent with spaces"),
    (r"found character '(.)'", rf"a string that starts with \1 {_QUOTES}"),
    ("found another document", "a job file is one document"),
    ("undefined alias", "a string that starts with * needs quotes"),
    (
        "mapping values are not allowed",
        "a string with a colon needs quotes, and keys of one section need the same indent",
    ),
    ("found '(<block mapping start>|-)'", "keys of one section need the same indent"),
    ("unexpected end of stream", "a quote is not closed"),
    ("got ':'", "a brace or bracket before it is not closed"),
)
"""What to do about text that is not YAML, by patterns of the parser's words for it."""

KeyPath = tuple[str | int, ...]


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
        return _read(text, source)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = _with_remedy(printable(str(error.problem or error.context)))
        raise UsageError(f"{source}{line}: not valid YAML: {problem}") from None
    except ReaderError as error:
        place = f"{source}, line {text.count(chr(10), 0, error.position) + 1}"
        what = f"U+{error.character:04X}"
        raise UsageError(f"{place}: a text file does not hold the character {what}") from None
    except RecursionError:
        raise UsageError(f"{source}: nested more than {MAX_DEPTH} deep") from None
    except YAMLError as error:
        raise UsageError(f"{source}: not valid YAML: {printable(str(error))}") from None


def _with_remedy(problem: str) -> str:
    """The parser's ``problem``, and what is most likely to mend it, if that is known."""
    for pattern, remedy in _REMEDIES:
        if match := re.search(pattern, problem):
            return f"{problem}; {match.expand(remedy)}"
    return problem


class _NoTagResolver(VersionedResolver):
    """Guesses no tags, so that a node has one only where it is written."""

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
        raise reader.error(root.start_mark.line, "only YAML 1.2 is read; drop the %YAML line")
    return YamlText(reader.value(root, (), root.start_mark.line), reader.lines)


class _NodeReader:
    """Turns nodes into plain data, and notes the line of each key and list item."""

    def __init__(self, source: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._source = source
        self._seen: set[int] = set()
        self._size = 0

    def value(self, node: Node, path: KeyPath, line: int) -> Any:
        """The data of ``node`` at ``path``.

        Args:
            line: where ``path`` was written, from 0; what an alias stands for is elsewhere.
        """
        is_copy = id(node) in self._seen
        self._seen.add(id(node))
        if node.ctag is not _NO_TAG:
            problem = f"tags such as {printable(str(node.ctag), 40)} are not read; leave it out"
            raise self.error(line, problem)
        self._grow(node, line)
        if isinstance(node, ScalarNode):
            return self._scalar(node, path, line)
        if len(path) >= MAX_DEPTH:
            raise self.error(line, f"nested more than {MAX_DEPTH} deep")
        if isinstance(node, MappingNode):
            return self._mapping(node, path, line, is_copy)
        assert isinstance(node, SequenceNode)
        items = []
        for index, item in enumerate(node.value):
            place = (*path, index)
            at = line if is_copy or id(item) in self._seen else item.start_mark.line
            self._note(place, at, is_copy)
            items.append(self.value(item, place, at))
        return items

    def _mapping(
        self, node: MappingNode, path: KeyPath, line: int, is_copy: bool
    ) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            at = line if is_copy else key_node.start_mark.line
            key = self._key(key_node, at)
            if key in entries:
                problem = (
                    f"{printable(key, 60)} is already given on line {first[key] + 1}; keep one"
                )
                raise self.error(at, problem)
            first[key] = at
            place = (*path, key)
            self._note(place, at, is_copy)
            entries[key] = self.value(value_node, place, at)
        return entries

    def _note(self, place: KeyPath, line: int, is_copy: bool) -> None:
        if not is_copy:
            self.lines[place] = line + 1

    def _key(self, node: Node, line: int) -> str:
        if not isinstance(node, ScalarNode) or node.ctag is not _NO_TAG:
            raise self.error(line, _PLAIN_KEY)
        self._grow(node, line)
        try:
            return valid_text(node.value)
        except ValueError as error:
            raise self.error(line, str(error)) from None

    def _scalar(self, node: ScalarNode, path: KeyPath, line: int) -> Scalar:
        try:
            return plain_scalar(node.value) if node.style is None else valid_text(node.value)
        except ValueError as error:
            name = f"{dotted(path)}: " if path else ""
            raise self.error(line, f"{name}{error}") from None

    def _grow(self, node: Node, line: int) -> None:
        self._size += 1 + (len(node.value) if isinstance(node, ScalarNode) else 0)
        if self._size > MAX_CHARACTERS:
            raise self.error(line, "aliases stand for too much text")

    def error(self, line: int, problem: str) -> UsageError:
        return UsageError(f"{self._source}, line {line + 1}: {problem}")
