"""Downloads images from web addresses, in bounded time."""

from __future__ import annotations

import time
import urllib.request
from http.client import HTTPException
from queue import Empty, SimpleQueue
from threading import Thread
from urllib.parse import urlsplit

from batchinfer.errors import RowError, one_line
from batchinfer.text.images.files import INVALID_IMAGE
from batchinfer.text.row_values import MAX_ROW_BYTES

TOTAL_S = 15.0
"""Time limit of a download, in seconds. It is short because a row with several images must not
reach ``Limits.seconds``, which would kill its worker."""
_WAIT_S = 10.0
"""Timeout of each read from a server, in seconds."""
_CHUNK = 1 << 16
_HEADERS = {"User-Agent": "batchinfer"}
"""Some servers refuse the name that urllib gives itself."""

_Answer = SimpleQueue["bytes | Exception"]


def downloaded(url: str, where: str) -> bytes:
    """Download a file. ``urlopen`` follows redirects only to HTTP, HTTPS and FTP.

    A thread downloads the file, because the timeout of a socket limits neither name resolution nor
    a server that sends one byte at a time.

    Raises:
        RowError: ``invalid_image``.
    """
    answer: _Answer = SimpleQueue()
    try:
        Thread(target=_download, args=(url, answer), daemon=True).start()
        data = answer.get(timeout=TOTAL_S)
    except RuntimeError as error:  # no thread can be started
        data = OSError(str(error))
    except Empty:
        reason = f"{urlsplit(url).hostname} did not send the image within {TOTAL_S:g} s"
        raise RowError(INVALID_IMAGE, f"{where}: {reason}: {url[:80]}") from None
    if isinstance(data, OSError | ValueError | HTTPException):
        raise RowError(INVALID_IMAGE, f"{where}: {url[:80]}: {one_line(data)}")
    if isinstance(data, Exception):
        raise data
    if len(data) > MAX_ROW_BYTES:
        raise RowError(INVALID_IMAGE, f"{where}: {url[:80]} has more than {MAX_ROW_BYTES} bytes")
    return data


def _download(url: str, answer: _Answer) -> None:
    """Put the file into ``answer``, or at least ``MAX_ROW_BYTES`` + 1 bytes of a longer file, or an
    error."""
    end = time.monotonic() + TOTAL_S
    data = bytearray()
    try:
        request = urllib.request.Request(url, headers=_HEADERS)
        with urllib.request.urlopen(request, timeout=_WAIT_S) as response:
            while (chunk := response.read1(_CHUNK)) and len(data) <= MAX_ROW_BYTES:
                data += chunk
                if time.monotonic() > end:  # nobody waits for the file any more
                    return
            if not chunk and getattr(response, "length", None):  # FTP responses have no length
                raise OSError(f"the connection ended {response.length} bytes before the file's end")
        answer.put(bytes(data))
    except Exception as error:
        answer.put(error)
