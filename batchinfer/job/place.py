"""Telling URLs from paths, without importing what reads either."""

from __future__ import annotations

import re

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(path: str) -> bool:
    """Whether a path names another place than this machine's file system."""
    return _URL.match(path) is not None
