"""An S3 server on this machine, and one that only complains."""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from obstore import put
from obstore.store import from_url

BUCKET = "lake"
SECRET = "not-for-any-artefact"
_SERVER = """
import sys, urllib.request
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
url = "http://%s:%d" % server.get_host_and_port()
urllib.request.urlopen(urllib.request.Request(url + "/BUCKET", method="PUT"))
print(url, flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server() -> Iterator[str]:
    """moto's server with an empty bucket, in a process of its own; its address."""
    code = _SERVER.replace("BUCKET", BUCKET)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as server:  # type: ignore[call-overload]
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()
            server.wait()


def environment(address: str) -> dict[str, str]:
    """What tells a program where the server is."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def upload(folder: Path, key: str) -> None:
    """Put every file of a folder under a key; the environment says where."""
    store = from_url(f"s3://{BUCKET}", client_options={"allow_http": True})
    for file in folder.rglob("*"):
        if file.is_file():
            put(store, f"{key}{file.relative_to(folder)}", file.read_bytes())


def mark_folder(address: str, key: str) -> None:
    """Put an empty object whose key ends in a slash, as consoles do where a folder is made."""
    url = f"{address}/{BUCKET}/{key.rstrip('/')}/"
    urllib.request.urlopen(urllib.request.Request(url, data=b"", method="PUT")).close()


@contextmanager
def complaining_server(status: int) -> Iterator[str]:
    """A server that answers every request with a status; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
