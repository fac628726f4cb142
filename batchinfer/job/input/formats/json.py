"""Reads JSON files: an array of objects, an object with such an array, or JSON Lines.

Each object becomes a row, parsed like a line of a JSON Lines file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import pyarrow as pa

from batchinfer.console.format import format_value, listed, near_name
from batchinfer.errors import DataError
from batchinfer.job.input.format import REWRITE, InputFile
from batchinfer.job.input.formats.encoding import KEEP_BYTES, to_utf8
from batchinfer.job.input.formats.json_values import JsonText
from batchinfer.job.input.formats.options import DEFAULT_OPTIONS, TextOptions
from batchinfer.job.input.formats.text_file import opened, read_errors
from batchinfer.job.input.jsonl import JsonlFormat, Line


class JsonFormat(JsonlFormat):
    """JSON files. The first character shows whether a file begins with an array or an object.

    If a file begins with an object, ``json_field`` names the key whose list holds the rows. Without
    ``json_field``, the file is read as JSON Lines.
    """

    title = "JSON"
    advice = f"a .json file must hold an array of objects, or JSON Lines; {REWRITE}"

    def __init__(self, options: TextOptions = DEFAULT_OPTIONS) -> None:
        super().__init__(options)
        self._is_array: dict[str, bool] = {}
        """Whether a file is an array, keyed by the file's path."""

    def inspect(self, path: str) -> tuple[InputFile, pa.Schema]:
        field = self.options.json_field
        with read_errors(path), opened(path) as chunks:
            first = JsonText(to_utf8(chunks, self.options.encoding, KEEP_BYTES), path).peek()
        self._is_array[path] = first == "["
        if first == "[" and field is not None:
            raise DataError(f"{path} is an array, not an object", hint="leave out input.json_field")
        if first == "{" and field is None:
            _refuse_single_object(path, self.options)
        return super().inspect(path)

    def lines(self, chunks: Iterable[bytes], path: str) -> Iterator[Line]:
        if self._is_array[path]:
            text = JsonText(chunks, path)
            yield from _encoded(text.array_items())
            text.end()
        elif self.options.json_field is None:
            yield from super().lines(chunks, path)
        else:
            yield from self._lines_of_field(chunks, path, self.options.json_field)

    def _lines_of_field(self, chunks: Iterable[bytes], path: str, field: str) -> Iterator[Line]:
        text, is_found = JsonText(chunks, path), False
        for key in text.object_keys():
            if key == field and text.peek() == "[":
                is_found = True
                yield from _encoded(text.array_items())
            else:
                text.skip()
        text.end()
        if not is_found:
            lists = lists_of_objects(path, self.options) or {}
            raise DataError(
                f"input.json_field: {path} has no list {format_value(field)}"
                + near_name(field, list(lists)),
                hint=f"its lists of objects are: {listed(lists) or '(none)'}",
            )


def _encoded(items: Iterable[tuple[int, str]]) -> Iterator[Line]:
    for line, item in items:
        yield line, item.encode("utf-8", "surrogateescape")


def lists_of_objects(path: str, options: TextOptions) -> Mapping[str, int] | None:
    """Find the lists of objects in a file that is a single object.

    Returns:
        Number of objects in each list, keyed by the list's key. None if the file is not a single
        object, or is a single line without lists of objects.

    Raises:
        DataError: the file cannot be read, or the text of its first object is not JSON.
    """
    with read_errors(path), opened(path) as chunks:
        text = JsonText(to_utf8(chunks, options.encoding, KEEP_BYTES), path)
        if text.peek() != "{":
            return None
        counts = ((key, text.skip()) for key in text.object_keys())
        lists = {key: count for key, count in counts if count}
        last_line = text.line  # before ``peek`` skips the file's last newline
        return None if text.peek() or (last_line == 1 and not lists) else lists


def _refuse_single_object(path: str, options: TextOptions) -> None:
    """Check that a file that begins with an object is JSON Lines, not one single object."""
    try:
        lists = lists_of_objects(path, options)
    except DataError:  # the first line of JSON Lines may be an error row
        return
    if lists is None:
        return
    if not lists:
        raise DataError(f"{path} is one object, without a list of objects", hint=REWRITE)
    raise DataError(
        f"{path} is one object; its lists of objects are: {listed(lists)}",
        hint=f"set input.json_field: {format_value(max(lists, key=lists.__getitem__))} to read a "
        "list, or input.format: jsonl to read the object as one row",
    )
