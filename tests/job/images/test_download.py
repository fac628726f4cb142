"""Downloads of images: servers that fail or hang cost only their own rows."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchinfer.config import PromptConfig
from batchinfer.errors import ExitCode, RowError
from batchinfer.job.images import download
from batchinfer.job.images.download import MOST_AT_ONCE, Downloads
from batchinfer.job.images.web_images import WebPrompts
from batchinfer.job.plan.plan import plan_job
from batchinfer.job.run.run_job import run_job
from batchinfer.text.images.files import ImageFile
from tests.job.images.pictures import png
from tests.job.images.test_image_jobs import job, results
from tests.vision_folders import make_vision_folder


class Pictures(BaseHTTPRequestHandler):
    """Serves one picture, also without its end, and refuses urllib's own name."""

    def do_GET(self) -> None:
        is_named = self.headers["User-Agent"] == "batchinfer"
        is_known = self.path in ("/a.png", "/cut.png")
        self.send_response((200 if is_known else 404) if is_named else 403)
        if is_known:
            self.send_header("Content-Length", str(len(png(0))))
        self.end_headers()
        if is_known:
            self.wfile.write(png(0)[: None if self.path == "/a.png" else -7])

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@contextmanager
def pictures() -> Iterator[str]:
    """Run a server of pictures; yield its address."""
    server = HTTPServer(("127.0.0.1", 0), Pictures)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def downloads() -> Iterator[Downloads]:
    found = Downloads()
    yield found
    found.close()


def never() -> None:
    """Let the caller wait."""


def test_files_and_errors(downloads: Downloads) -> None:
    with pictures() as server:
        names = ("a.png", "b.png", "cut.png")
        found = downloads.start([f"{server}/{name}" for name in names], never)()
    good, missing, cut = found.values()
    assert good == ImageFile(png(0), f"{server}/a.png")
    assert "404" in missing.message
    assert "ended 7 bytes before the file's end" in cut.message
    (refused,) = downloads.start([f"{server}/a.png"], never)().values()
    assert "refused" in refused.message
    (bad,) = downloads.start(["http://[::1"], never)().values()
    assert {error.code for error in (missing, cut, refused, bad)} == {"invalid_image"}


def test_a_server_that_hangs_is_an_error(
    downloads: Downloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TOTAL_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections and never answers
        url = f"http://127.0.0.1:{server.getsockname()[1]}/a.png"
        (error,) = downloads.start([url], never)().values()
    assert error.code == "invalid_image"
    assert error.message == f"127.0.0.1 did not send the image within 0.05 s: {url}"


def test_any_number_of_files_of_a_server_that_hangs(
    downloads: Downloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few downloads time out; then the rest of this server's files fail without a connection."""
    reads: list[str] = []

    def read(url: str) -> bytes:
        reads.append(url)
        if "silent" in url:
            raise TimeoutError
        return b"file"

    monkeypatch.setattr(download, "_read", read)
    urls = [f"http://silent/{number}.png" for number in range(300)]
    found = downloads.start([*urls, "http://good/a.png"], never)()
    assert found.pop("http://good/a.png") == ImageFile(b"file", "http://good/a.png")
    assert {error.code for error in found.values()} == {"invalid_image"}
    assert "silent did not send the image within 15 s" in found[urls[0]].message
    assert "silent did not send 4 other images in time" in found[urls[-1]].message
    assert len(reads) < 3 * MOST_AT_ONCE


def test_an_avoided_server_gets_another_chance(
    downloads: Downloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "AVOIDED_S", -1.0)
    monkeypatch.setattr(download, "MOST_TIMEOUTS", 1)
    hangs = [True, False]

    def read(_url: str) -> bytes:
        if hangs.pop(0):
            raise TimeoutError
        return b"file"

    monkeypatch.setattr(download, "_read", read)
    first, second = (downloads.start(["http://a/b"], never)()["http://a/b"] for _ in range(2))
    assert isinstance(first, RowError)
    assert second == ImageFile(b"file", "http://a/b")


def test_waiting_ends_if_the_job_is_stopped(
    downloads: Downloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(download, "_read", lambda url: answer.wait() and b"")
    monkeypatch.setattr(download, "_POLL_S", 0.01)

    def stopped() -> None:
        raise InterruptedError

    wait = downloads.start(["http://a/b"], stopped)
    with pytest.raises(InterruptedError):
        wait()
    answer.set()


class Echo:
    """Returns rows instead of prompts."""

    columns = ("image", "messages", "text")

    def start(self, rows: Any) -> Any:
        return lambda: rows


def test_files_replace_addresses_in_the_places_of_images(
    downloads: Downloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_read", str.encode)
    url = "HTTPS://a/b.png"
    file = ImageFile(url.encode(), url)
    prompts = WebPrompts(Echo(), PromptConfig(images="image"), downloads, never)

    def row(image: Any) -> dict[str, Any]:
        parts = [
            {"type": b"image_url", "image_url": {"url": image, "detail": "low"}},
            {"type": "image", "image": image},
            {"type": "text", "text": url},
        ]
        talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": url}]
        cell = [image, {"bytes": None, "path": image}, "a.png", None]
        return {"image": cell, "messages": talk, "text": url}

    assert prompts.start([row(url), row(url.encode())])() == [row(file)] * 2
    assert prompts.start([row("a.png")])() == [row("a.png")]


def test_a_job_downloads_images_only_if_it_says_so(tmp_path: Path) -> None:
    model = make_vision_folder("llava", tmp_path / "model")
    with pictures() as server:
        names = [f"{server}/a.png", f"{server}/b.png"]
        rows = pa.table({"text": [*"ab"], "image": names})
        urls: dict[str, Any] = {"input": {"media_urls": True}}
        plain = {"output": {"path": str(tmp_path / "plain")}}
        assert run_job(job(tmp_path, model, rows, **urls), quiet=True) is ExitCode.OK
        good, missing = (row["error"] for row in results(tmp_path))
        prompts = plan_job(job(tmp_path, model, rows, **plain))
    assert good is None
    assert "404" in missing["message"]
    assert prompts["errors"] == {"invalid_image": 2}
