"""Reads image files, and finds the images in the values of rows."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_to_bytes

from batchinfer.errors import RowError
from batchinfer.text.row_values import MAX_ROW_BYTES

INVALID_IMAGE = "invalid_image"
_DATA = "data:"
_BASE64 = re.compile(rb"[A-Za-z0-9+/\s]+=*")
_MAX_PATH_CHARS = 4096
"""Maximum length of a path on Linux. A longer value may be a malformed data URL."""
_MAX_SHOWN = 160
"""Maximum number of characters of a name in a message. The beginning and the end of a longer name
are shown, because many paths begin with the same folders."""


class ImageMemoryError(MemoryError):
    """The model's image processor needs more memory than a worker has."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The bytes of an image, or the path of its file."""

    data: bytes | None = field(repr=False)
    path: str | None = None
    """Absolute path if ``data`` is None; else the web address of ``data``, if known."""

    @property
    def name(self) -> str:
        """Name of the image in error messages."""
        return "an image" if self.path is None else shown(self.path)

    def read(self) -> bytes:
        """Return the bytes.

        Raises:
            RowError: ``invalid_image``: the file cannot be read.
        """
        if self.data is not None:
            return self.data
        assert self.path is not None
        if len(self.path) > _MAX_PATH_CHARS:
            raise RowError(INVALID_IMAGE, f"{self.name} is not an image, and too long for a path")
        try:
            # Without O_NONBLOCK, opening a FIFO that has no writer would block forever.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise RowError(INVALID_IMAGE, f"{self.name} is not a file")
                with open(descriptor, "rb", closefd=False) as file:
                    data = file.read(MAX_ROW_BYTES + 1)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise RowError(INVALID_IMAGE, f"{self.name}: {error.strerror}") from None
        if len(data) > MAX_ROW_BYTES:
            raise RowError(INVALID_IMAGE, f"{self.name} has more than {MAX_ROW_BYTES} bytes")
        return data


class _Unprintable:
    """Stands for an image in a template's variables; raises a RowError if the template prints
    it."""

    def __init__(self, column: str) -> None:
        self._column = column

    def __str__(self) -> str:
        reason = f"column {self._column} holds an image, which a template cannot print"
        raise RowError("unsupported_content", reason)

    __repr__ = __str__  # as part of a struct or list


def without_images(value: Any, column: str) -> Any:
    """Return the value of an image column for a template. If the template prints an image, the row
    fails with ``unsupported_content``; a web address can be printed."""
    if isinstance(value, ImageFile):
        return value.path or _Unprintable(column)
    if isinstance(value, Mapping):
        return {key: without_images(item, column) for key, item in value.items()}
    if isinstance(value, list):
        return [without_images(item, column) for item in value]
    return value


class ImageFiles:
    """Finds the images in a value: bytes of files, and data URLs. Picklable. A subclass can also
    find images by path or web address (``elsewhere``).
    """

    def in_cell(self, value: Any, where: str) -> list[ImageFile]:
        """Return the images of a cell, in order; an empty list for null.

        Args:
            value: an ``ImageFile``, a path or a data URL (``str`` or UTF-8 bytes), a struct with
                the fields ``bytes`` and ``path`` (as in datasets of the Hugging Face Hub), or a
                list of these.
            where: name of the cell in error messages.

        Raises:
            RowError: ``invalid_image``.
        """
        if value is None:
            return []
        if isinstance(value, Mapping) and all(item is None for item in value.values()):
            return []
        if isinstance(value, list | tuple):
            return [image for item in value for image in self.in_cell(item, where)]
        return [self._one(value, where)]

    def _one(self, value: Any, where: str) -> ImageFile:
        if isinstance(value, RowError):
            raise value
        if isinstance(value, ImageFile):
            return value
        if isinstance(value, Mapping):
            return self._in_struct(value, where)
        if not isinstance(value, bytes | str):
            kind = type(value).__name__
            raise RowError(INVALID_IMAGE, f"{where}: {kind} is neither an image nor a path")
        if not value:
            raise RowError(INVALID_IMAGE, f"{where} is empty")
        return self.named(_text(value, where), where)

    def _in_struct(self, value: Mapping[str, Any], where: str) -> ImageFile:
        given = [value[key] for key in ("bytes", "path") if value.get(key) is not None]
        if not given:
            raise RowError(INVALID_IMAGE, f"{where} has neither bytes nor a path")
        return self._one(given[0], where)

    def named(self, name: str, where: str) -> ImageFile:
        """Return the image that a path, a data URL or a web address names.

        Raises:
            RowError: ``invalid_image``.
        """
        if has_scheme(name, _DATA):
            return ImageFile(_data_of(name, where))
        return self.elsewhere(name, where)

    def elsewhere(self, name: str, where: str) -> ImageFile:
        """Return the image that a path or a web address names.

        Raises:
            RowError: ``invalid_image``.
        """
        raise RowError(
            INVALID_IMAGE,
            f"{where}: {shown(name)} is a path or a web address, which cannot be read here; give "
            "the bytes of the file, or a PIL image",
        )


def has_scheme(name: str, *schemes: str) -> bool:
    """Return True if a URL has one of ``schemes`` (such as ``data:``), in upper or lower case."""
    return name[: max(map(len, schemes))].lower().startswith(schemes)


def shown(name: str) -> str:
    """Return a name for messages, shortened in the middle if it is long."""
    if len(name) <= _MAX_SHOWN:
        return name
    kept = (_MAX_SHOWN - 3) // 2
    return f"{name[:kept]}...{name[-kept:]}"


def _text(value: str | bytes, where: str) -> str:
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError as error:
        raise RowError("invalid_utf8", f"{where}: {error}") from None


def _data_of(url: str, where: str) -> bytes:
    """Decode a data URL (RFC 2397)."""
    head, comma, data = url.partition(",")
    try:
        if not comma:
            raise ValueError("it has no comma")
        if head.lower().endswith(";base64"):
            return base64.b64decode(data, validate=True)
        content = unquote_to_bytes(data)
        if _BASE64.fullmatch(content):  # no image file has only these bytes
            raise ValueError("its data is base64, but ;base64 is missing before the comma")
        return content
    except (ValueError, binascii.Error) as error:
        raise RowError(INVALID_IMAGE, f"{where}: a data URL cannot be decoded: {error}") from None
