"""S3 servers on this machine, some of which answer with errors."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import obstore
import pytest
from obstore import put
from obstore.store import from_url

from batchinfer.job.storage import connection

BUCKET = "lake"
LAKE = f"s3://{BUCKET}"
SECRET = "not-for-any-artifact"
_SERVER = """
import sys, threading, urllib.request
from moto.moto_server import threaded_moto_server as moto

class OneAtATime(moto.DomainDispatcherApplication):
    # A store decides about a condition and writes in one; moto's threads meet in between.
    mutex = threading.Lock()

    def __call__(self, *request):
        with self.mutex:
            return super().__call__(*request)

moto.DomainDispatcherApplication = OneAtATime
server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
url = "http://%s:%d" % server.get_host_and_port()
urllib.request.urlopen(urllib.request.Request(url + "/BUCKET", method="PUT"))
print(url, flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server() -> Iterator[str]:
    """Start moto's server in its own process, with an empty bucket; yield its address."""
    code = _SERVER.replace("BUCKET", BUCKET)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as server:  # type: ignore[call-overload]
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()
            server.wait()


def environment(address: str) -> dict[str, str]:
    """Return environment variables that tell a program where the server is."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def point_to(address: str, patch: pytest.MonkeyPatch) -> None:
    """Connect this process to the server, with short pauses before retries."""
    connection.connect.cache_clear()
    for name, value in environment(address).items():
        patch.setenv(name, value)
    pause = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5)}
    retry = {"max_retries": 4, "retry_timeout": timedelta(seconds=60), "backoff": pause}
    patch.setattr(connection, "RETRY", retry)


def objects(key: str = "") -> dict[str, bytes]:
    """Return the objects under a key on the environment's server, keyed by the rest of their
    keys."""
    store = from_url(f"s3://{BUCKET}", client_options={"allow_http": True})
    keys = [entry["path"] for some in obstore.list(store, key or None) for entry in some]
    return {name[len(key) :].lstrip("/"): bytes(obstore.get(store, name).bytes()) for name in keys}


def upload(folder: Path, key: str) -> None:
    """Put every file of a folder under a key, on the environment's server."""
    store = from_url(f"s3://{BUCKET}", client_options={"allow_http": True})
    for file in folder.rglob("*"):
        if file.is_file():
            put(store, f"{key}{file.relative_to(folder)}", file.read_bytes())


def mark_folder(address: str, key: str) -> None:
    """Put an empty object whose key ends in a slash, as S3 consoles do to create a folder."""
    url = f"{address}/{BUCKET}/{key.rstrip('/')}/"
    urllib.request.urlopen(urllib.request.Request(url, data=b"", method="PUT")).close()


@contextmanager
def complaining_server(status: int) -> Iterator[str]:
    """Start a server that answers every request with ``status``; yield its address."""
    with between("", lambda request: status) as address:
        yield address


@dataclass
class Request:
    """A request to a server."""

    method: str
    path: str
    headers: dict[str, str]


@contextmanager
def between(address: str, answer: Callable[[Request], int | None]) -> Iterator[str]:
    """Start a proxy that forwards requests, unless ``answer`` replaces the response.

    Yield the proxy's address.

    Args:
        address: the server to forward to.
        answer: returns the status to send for a request. None: forward the request, with any
            change that ``answer`` made, and return the response. Negative: forward the request, but
            answer with the status without its sign.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = Request(self.command, self.path, dict(self.headers.items()))
            status = answer(request)
            if status is not None and status > 0:
                return self._send(status, [], b"")
            other = http.client.HTTPConnection(address.removeprefix("http://"))
            other.request(request.method, request.path, body, request.headers)
            found = other.getresponse()
            content = found.read()
            self._send(abs(status or found.status), found.getheaders(), content)
            other.close()

        def _send(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            named = {name.lower(): value for name, value in headers}
            length = named.pop("content-length", "0")
            for name, value in named.items():
                if name not in ("connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
        setattr(Handler, f"do_{method}", Handler._answer)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
