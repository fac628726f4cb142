"""Reads the values in a JSON text one at a time, so that a large array needs little memory.

``JSONDecoder.raw_decode`` of Python's ``json`` finds the end of each value.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator

from batchinfer.console.format import format_value
from batchinfer.errors import DataError

MAX_VALUE_BYTES = 64 << 20
MAX_DEPTH = 201
"""Maximum number of nested arrays and objects in a row, counting the row itself; the limit of
pydantic's parser, which reads the rows."""
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)  # long integers are an error in int()
_SPACES = " \t\n\r"
_SPACE = re.compile(f"[{_SPACES}]*")
_COMMA = re.compile(f"[{_SPACES}]*,[{_SPACES}]*")
_NUMBER_CONTINUES = re.compile(r"\.?|[eE][+-]?")
"""Text that may follow a number at the end of a chunk if the next chunk continues the number."""
_LONGEST_TOKEN = 16
"""An error within this many characters of a chunk's end may come from a token that the next chunk
completes."""


class JsonText:
    """A file's text, which is read from the current position onward.

    If the text is not JSON, the methods raise a DataError with the line and character numbers.
    """

    def __init__(self, chunks: Iterable[bytes], path: str) -> None:
        """Args:
        chunks: the text in UTF-8; bytes that are not UTF-8 are kept.
        path: path of the file, for messages.
        """
        self._chunks = codecs.iterdecode(chunks, "utf-8", "surrogateescape")
        self._path = path
        self._text = next(self._chunks, "").removeprefix("\ufeff")
        self._at = 0
        self._line, self._line_start = 1, 0

    @property
    def line(self) -> int:
        """Number of the current line, from 1."""
        return self._line

    def peek(self) -> str:
        """Skip whitespace, and return the next character; "" at the end."""
        if self._at < len(self._text) and (first := self._text[self._at]) not in _SPACES:
            return first  # faster than the pattern
        while True:
            self._move(_SPACE.match(self._text, self._at).end())  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def take(self, expected: str) -> str:
        """Skip whitespace, and read one of the expected characters."""
        found = self.peek()
        if not found or found not in expected:
            wanted = " or ".join(map(format_value, expected))
            raise self._error(f"{wanted} is missing", self._at)
        self._move(self._at + 1)
        return found

    def value(self) -> str:
        """Skip whitespace, and read a value; return its text."""
        self.peek()
        while True:
            try:
                end = _DECODER.raw_decode(self._text, self._at)[1]
            except json.JSONDecodeError as error:
                is_cut = (
                    error.msg.startswith("Unterminated string")
                    or error.pos >= len(self._text) - _LONGEST_TOKEN
                )
                if not (is_cut and self._read_more()):
                    raise self._error(error.msg, error.pos) from None
            except RecursionError:
                depth = f"its values are nested in more than {MAX_DEPTH} levels"
                raise self._error(depth, self._at, "cannot be read") from None
            else:
                continues = _NUMBER_CONTINUES.fullmatch(self._text, end)
                if continues is None or not self._read_more():
                    break
        text = self._text[self._at : end]
        self._move(end)
        return text

    def array_items(self) -> Iterator[tuple[int, str]]:
        """Read an array; yield the line and the text of each item."""
        self.take("[")
        mark = self.take("]") if self.peek() == "]" else ","
        while mark == ",":
            self.peek()
            line = self._line
            yield line, self.value()
            comma = _COMMA.match(self._text, self._at)
            if comma is None:
                mark = self.take(",]")
            else:  # faster than ``take``
                self._move(comma.end())

    def object_keys(self) -> Iterator[str]:
        """Read an object; yield each key before its value, which the caller must read."""
        self.take("{")
        mark = self.take("}") if self.peek() == "}" else ","
        while mark == ",":
            if self.peek() != '"':
                raise self._error("a key is missing", self._at)
            key = json.loads(self.value())
            self.take(":")
            yield key
            mark = self.take(",}")

    def skip(self) -> int | None:
        """Skip a value without holding a whole array in memory.

        Return the number of items if the value is an array of objects, else None.
        """
        first = self.peek()
        if first == "[":
            kinds = [0, 0]
            for _, item in self.array_items():
                kinds[item.startswith("{")] += 1
            return kinds[True] if kinds[True] and not kinds[False] else None
        if first == "{":
            for _ in self.object_keys():
                self.skip()
        else:
            self.value()
        return None

    def end(self) -> None:
        """Check that only whitespace is left."""
        if self.peek():
            raise self._error("text follows the end of the value", self._at)

    def _read_more(self) -> bool:
        """Read more text; return False at the end of the file.

        Each call at least doubles the unread text, so that a long value is parsed only a few times.
        """
        unread = self._text[self._at :]
        if len(unread) > MAX_VALUE_BYTES:
            raise self._error(f"a value has more than {MAX_VALUE_BYTES >> 20} MiB", self._at)
        parts, size = [unread], 0
        for part in self._chunks:
            parts.append(part)
            size += len(part)
            if size >= len(unread):
                break
        if not size:
            return False
        self._text, self._at, self._line_start = "".join(parts), 0, self._line_start - self._at
        return True

    def _move(self, to: int) -> None:
        ends = self._text.count("\n", self._at, to)
        if ends:
            self._line += ends
            self._line_start = self._text.rindex("\n", self._at, to) + 1
        self._at = to

    def _error(self, problem: str, at: int, what: str = "is not JSON") -> DataError:
        self._move(at)
        character = self._at - self._line_start + 1
        return DataError(
            f"{self._path}, line {self._line}, character {character} {what}: {problem}",
            hint="repair the file, or leave it out of input.path",
        )
