"""URLs told from paths, and URLs of object stores taken apart and put together as paths are."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

STORES = ("s3", "gs")
"""Object stores that can be read from and written to."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def is_url(path: str) -> bool:
    """Whether a path names another place than this machine's file system."""
    return scheme_of(path) is not None


def scheme_of(path: str) -> str | None:
    """What a URL begins with, before ``://``; None for a path."""
    match = _URL.match(path)
    return match and match.group(1)


class StorePath(PurePosixPath):
    """``s3://bucket/folder/name``; equal ones are written alike, with no slash at their end."""

    __slots__ = ()

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest}"

    @property
    def bucket(self) -> str:
        """Scheme and bucket."""
        return f"{self.parts[0]}//{self.parts[1]}"

    @property
    def key(self) -> str:
        """What the bucket knows it as."""
        return "/".join(self.parts[2:])
