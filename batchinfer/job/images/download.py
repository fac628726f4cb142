"""Downloads images from web addresses: a few at a time, each with a time limit.

Downloads run in threads of the job's process and not in text processes: a row may keep a text
process busy only for ``Limits.seconds``, and any number of servers may hang.
"""

from __future__ import annotations

import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from http.client import HTTPException
from queue import SimpleQueue
from threading import Lock, Thread
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from batchinfer.errors import RowError, one_line
from batchinfer.job.images.time_limit import within
from batchinfer.text.images.files import INVALID_IMAGE, ImageFile, shown
from batchinfer.text.row_values import MAX_ROW_BYTES

TOTAL_S = 15.0
"""Time limit of a download, in seconds."""
MOST_AT_ONCE = 16
"""Number of files to download at the same time."""
MOST_TIMEOUTS = 4
"""Number of consecutive timeouts after which further downloads from a host fail at once."""
AVOIDED_S = 60.0
"""Seconds until a host with too many timeouts is tried again."""
_WAIT_S = 10.0
"""Timeout of each read from a server, in seconds."""
_POLL_S = 0.1
_CHUNK = 1 << 16
_HEADERS = {"User-Agent": "batchinfer"}
"""Replaces urllib's default User-Agent, which some servers refuse."""

Downloaded = ImageFile | RowError


class Downloads:
    """Downloads files in threads, which ``start`` starts and ``close`` ends."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[str, Future[Downloaded]] | None] = SimpleQueue()
        self._num_threads = 0
        self._is_closed = False
        self._lock = Lock()
        self._timeouts = Counter[str]()
        """Number of consecutive timeouts, keyed by host."""
        self._avoided_until: dict[str, float] = {}
        """Values of ``time.monotonic()`` at which hosts may be tried again, keyed by host."""

    def start(
        self, urls: Collection[str], check_stopped: Callable[[], None]
    ) -> Callable[[], Mapping[str, Downloaded]]:
        """Start downloading files.

        Args:
            check_stopped: called every 0.1 s while waiting; raises an error to stop waiting.

        Returns:
            A function that waits for the downloads, and returns a mapping from each URL to its
            file or to the error ``invalid_image``.
        """
        futures: dict[str, Future[Downloaded]] = {url: Future() for url in urls}
        for url, future in futures.items():
            self._waiting.put((url, future))
        while self._num_threads < min(MOST_AT_ONCE, len(futures)):
            Thread(target=self._work, daemon=True).start()
            self._num_threads += 1

        def wait() -> Mapping[str, Downloaded]:
            return {url: _result(future, check_stopped) for url, future in futures.items()}

        return wait

    def close(self) -> None:
        """End the threads. Threads that are downloading finish their current file first."""
        self._is_closed = True
        for _ in range(self._num_threads):
            self._waiting.put(None)

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None and not self._is_closed:
            url, future = item
            try:
                future.set_result(self._downloaded(url))
            except Exception as error:
                future.set_exception(error)

    def _downloaded(self, url: str) -> Downloaded:
        host = ""
        try:
            host = urlsplit(url).hostname or ""
            if self._is_avoided(host):
                reason = f"{host} did not send {MOST_TIMEOUTS} other images in time"
                return RowError(INVALID_IMAGE, f"{reason}: {shown(url)}")
            data = within(TOTAL_S, lambda: _read(url))
        except TimeoutError:
            self._note_timeout(host)
            reason = f"{host} did not send the image within {TOTAL_S:g} s"
            return RowError(INVALID_IMAGE, f"{reason}: {shown(url)}")
        except (OSError, ValueError, HTTPException) as error:
            self._timeouts.pop(host, None)
            return RowError(INVALID_IMAGE, f"{shown(url)}: {one_line(error)}")
        self._timeouts.pop(host, None)
        if len(data) > MAX_ROW_BYTES:
            return RowError(INVALID_IMAGE, f"{shown(url)} has more than {MAX_ROW_BYTES} bytes")
        return ImageFile(data, url)

    def _is_avoided(self, host: str) -> bool:
        return self._avoided_until.get(host, 0.0) > time.monotonic()

    def _note_timeout(self, host: str) -> None:
        with self._lock:
            self._timeouts[host] += 1
            if self._timeouts[host] >= MOST_TIMEOUTS:
                self._avoided_until[host] = time.monotonic() + AVOIDED_S


def _result(future: Future[Downloaded], check_stopped: Callable[[], None]) -> Downloaded:
    while True:
        try:
            return future.result(_POLL_S)
        except TimeoutError:
            check_stopped()


def _read(url: str) -> bytes:
    """Return a file, or at least ``MAX_ROW_BYTES`` + 1 bytes of a longer file. ``urlopen`` follows
    redirects only to HTTP, HTTPS and FTP."""
    end = time.monotonic() + TOTAL_S
    data = bytearray()
    request = urllib.request.Request(url, headers=_HEADERS)
    try:
        response = urllib.request.urlopen(request, timeout=_WAIT_S)
    except HTTPError as error:
        error.close()
        raise
    except URLError as error:
        raise error.reason if isinstance(error.reason, TimeoutError) else error from None
    with response:
        while (chunk := response.read1(_CHUNK)) and len(data) <= MAX_ROW_BYTES:
            data += chunk
            if time.monotonic() > end:
                raise TimeoutError
        if not chunk and getattr(response, "length", None):  # FTP responses have no length
            raise OSError(f"the connection ended {response.length} bytes before the file's end")
    return bytes(data)
