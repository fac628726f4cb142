"""Telling URLs from paths, without importing what reads either."""

from __future__ import annotations

import re

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
