"""Downloads images from web addresses."""

from __future__ import annotations

import urllib.request
from http.client import HTTPException

from batchinfer.errors import RowError, one_line
from batchinfer.text.images.files import INVALID_IMAGE
from batchinfer.text.row_values import MAX_ROW_BYTES

_DOWNLOAD_S = 30.0
"""Timeout of each read from a server, in seconds."""


def downloaded(url: str, where: str) -> bytes:
    """Download a file. ``urlopen`` follows redirects only to HTTP, HTTPS and FTP.

    Raises:
        RowError: ``invalid_image``.
    """
    try:
        with urllib.request.urlopen(url, timeout=_DOWNLOAD_S) as answer:
            data: bytes = answer.read(MAX_ROW_BYTES + 1)
    except (OSError, ValueError, HTTPException) as error:
        raise RowError(INVALID_IMAGE, f"{where}: {url[:80]}: {one_line(error)}") from None
    if len(data) > MAX_ROW_BYTES:
        raise RowError(INVALID_IMAGE, f"{where}: {url[:80]} has more than {MAX_ROW_BYTES} bytes")
    return data
