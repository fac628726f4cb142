"""Datasets of the Hugging Face Hub; a local server stands in for the Hub."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from batchinfer.errors import DataError, ExitCode, StorageError
from batchinfer.job.input.dataset import open_source
from batchinfer.job.input.discover import find_files
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from batchinfer.job.storage.reader import remote_store_of
from batchinfer.job.storage.whole_files import read_whole
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job
from tests.job.job_files import MINIMAL, write_job

NAME = "datasets/org/data"
URL = f"hf://{NAME}"


class Hub(BaseHTTPRequestHandler):
    """Serves one dataset from ``folder``: the parts of the Hub's API that huggingface_hub uses."""

    folder: Path
    status = 200

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path in (f"/api/{NAME}", f"/api/{NAME}/revision/main"):
            self.answer({"id": "org/data", "sha": "0" * 40, "siblings": []})
        elif path.startswith(f"/api/{NAME}/tree/main"):
            self.tree(path.removeprefix(f"/api/{NAME}/tree/main").strip("/"))
        elif path.startswith(f"/{NAME}/resolve/main/"):
            self.content(self.folder / path.removeprefix(f"/{NAME}/resolve/main/"))
        else:
            self.refuse()

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        files = [self.folder / name for name in form["paths"]]
        self.answer([self.entry(file) for file in files if file.exists()])

    def tree(self, below: str) -> None:
        folder = self.folder / below
        if not folder.is_dir():
            self.refuse()
            return
        recursive = "recursive=True" in self.path or "recursive=true" in self.path
        found = folder.rglob("*") if recursive else folder.iterdir()
        self.answer([self.entry(file) for file in sorted(found)])

    def entry(self, file: Path) -> dict[str, object]:
        named = {"path": str(file.relative_to(self.folder))}
        if file.is_dir():
            return {**named, "type": "directory", "oid": "1" * 40, "size": 0}
        digest = hashlib.sha1(file.read_bytes()).hexdigest()
        return {**named, "type": "file", "oid": digest, "size": file.stat().st_size}

    def content(self, file: Path) -> None:
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        data = file.read_bytes()[int(first) : int(last) + 1]
        self.respond(206, data)

    def answer(self, value: object) -> None:
        self.respond(self.status, json.dumps(value).encode())

    def refuse(self) -> None:
        self.respond(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def respond(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the offline mode of the test suite; the stand-in is on this machine."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """Start the stand-in, with ten rows in three files and a file that is not data."""
    folder = tmp_path / "hub"
    for name, values in (("b", range(4, 7)), ("a", range(4)), ("sub/c", range(7, 10))):
        prompts = [f"{value} asks" for value in values]
        write_parquet(folder / f"{name}.parquet", {"prompt": prompts, "x": values})
    (folder / "README.md").write_text("words")
    handler = type("Handler", (Hub,), {"folder": folder})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_hub_lists_the_facts_of_files(hub: type[Hub]) -> None:
    store = remote_store_of(f"{URL}/")
    found = dict(store.stats_below(f"{URL}/"))
    assert set(found) == {
        f"{URL}/{name}" for name in ("README.md", "a.parquet", "b.parquet", "sub/c.parquet")
    }
    assert found == {url: store.stat(url) for url in found}
    assert dict(store.stats_below(f"{URL}/sub/")) == {
        f"{URL}/sub/c.parquet": found[f"{URL}/sub/c.parquet"]
    }
    assert dict(store.stats_below(f"{URL}/gone/")) == {}


def test_hub_dataset_is_read_in_path_order(hub: type[Hub]) -> None:
    source = open_source(URL)
    assert [file.path for file in source.files] == [
        f"{URL}/{name}" for name in ("a.parquet", "b.parquet", "sub/c.parquet")
    ]
    read = [x for _, batch in source.scan(["x"], [range(10)]) for x in batch[0].to_pylist()]
    assert read == list(range(10))


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ("/a.parquet", ["a.parquet"]),
        ("/sub/", ["sub/c.parquet"]),
        ("/*.parquet", ["a.parquet", "b.parquet"]),
        ("/s*", ["sub/c.parquet"]),
        ("/**/*.parquet", ["a.parquet", "b.parquet", "sub/c.parquet"]),
    ],
)
def test_files_folders_and_globs(hub: type[Hub], entry: str, names: list[str]) -> None:
    assert find_files(URL + entry) == [f"{URL}/{name}" for name in names]


def test_small_files_are_read_whole(hub: type[Hub]) -> None:
    assert read_whole(f"{URL}/README.md", 5) == b"words"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_whole(f"{URL}/README.md", 4)
    with pytest.raises(OSError, match="does not exist"):
        read_whole(f"{URL}/gone.png", 5)


@pytest.mark.parametrize("entry", ["/gone.parquet", "/gone/", "/*.csv"])
def test_missing_hub_file_is_a_data_error(hub: type[Hub], entry: str) -> None:
    with pytest.raises(DataError, match=r"input\.path: "):
        find_files(URL + entry)


def test_hub_file_with_new_content_has_a_new_etag(hub: type[Hub]) -> None:
    source = open_source(URL)
    write_parquet(hub.folder / "b.parquet", {"prompt": ["new"], "x": [5]})
    with pytest.raises(DataError, match=r"b\.parquet was changed while the job was running"):
        source.check_unchanged()


def test_unreachable_hub_is_a_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(StorageError, match=r"cannot read hf://datasets/org/data"):
        find_files(f"{URL}/*.parquet")


def test_job_reads_a_hub_dataset(hub: type[Hub], tmp_path: Path) -> None:
    spec = job(tmp_path, input={"path": URL})
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    assert run_job(spec, build=None, quiet=True) is ExitCode.OK


def test_hub_url_in_a_job_file_is_unchanged(tmp_path: Path) -> None:
    path = write_job(tmp_path, MINIMAL.replace("prompts.parquet", f"{URL}@v1/train"))
    assert load_job(path).input.paths == (f"{URL}@v1/train",)
