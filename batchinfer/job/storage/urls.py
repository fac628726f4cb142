"""Distinguishes URLs from paths, and splits URLs of object stores and globs."""

from __future__ import annotations

import glob
import re
from itertools import takewhile
from pathlib import PurePosixPath
from typing import TypeVar

STORES = ("s3", "gs")
"""URL schemes of the object stores that batchinfer reads and writes."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ESCAPED = re.compile(r"\[([*?[])\]")

_Path = TypeVar("_Path", bound=PurePosixPath)


def is_url(path: str) -> bool:
    """Return True for a URL, and False for a path in this machine's file system."""
    return scheme_of(path) is not None


def scheme_of(path: str) -> str | None:
    """Return the scheme of a URL, without ``://``; None for a path."""
    match = _URL.match(path)
    return match and match.group(1)


def fixed_part(pattern: _Path) -> _Path:
    """Return the leading path components of a glob that have no wildcards, unescaped."""
    parts = takewhile(lambda part: glob.escape(_unescaped(part)) == part, pattern.parts)
    return type(pattern)(*map(_unescaped, parts))


def _unescaped(part: str) -> str:
    return _ESCAPED.sub(r"\1", part)


class StorePath(PurePosixPath):
    """A URL such as ``s3://bucket/folder/name``, without a trailing slash."""

    __slots__ = ()

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest}"

    @property
    def bucket(self) -> str:
        """Scheme and bucket of the URL."""
        return f"{self.parts[0]}//{''.join(self.parts[1:2])}"

    @property
    def key(self) -> str:
        """The object's name in its bucket; "" for the bucket itself."""
        return "/".join(self.parts[2:])
