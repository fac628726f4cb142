"""Broken and hostile images and paths: each is an error of its row, and other rows run."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from batchinfer.config import PromptConfig
from batchinfer.errors import ExitCode, ModelError, RowError
from batchinfer.job.images.media_files import MediaFiles
from batchinfer.job.run.run_job import run_job
from batchinfer.text.images.decode import OpenImage
from batchinfer.text.images.files import ImageFile, ImageFiles
from batchinfer.text.images.loading import load_image_processor
from batchinfer.text.processes.limits import Limits
from batchinfer.worker.vision.tower import VisionTower
from tests.job.images.pictures import HUB_IMAGE, encoded, picture, png
from tests.job.images.test_image_jobs import job, results
from tests.vision_folders import make_vision_folder

MAX_PIXELS = 100_000


def png_of(width: int, height: int) -> bytes:
    """Return a PNG with a header that gives this size, but without pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def damaged(data: bytes) -> bytes:
    return data[: len(data) // 2] + b"\0" * 64 + data[len(data) // 2 + 64 :]


JPEG, GIF, TIFF, WEBP, BMP = (
    encoded(picture(9), form) for form in ("JPEG", "GIF", "TIFF", "WEBP", "BMP")
)
BROKEN = {
    "truncated_png": png(0)[:-200],
    "truncated_jpeg": JPEG[:-200],
    "truncated_gif": GIF[:60],
    "truncated_tiff": TIFF[:-900],
    "truncated_webp": WEBP[:100],
    "truncated_bmp": BMP[:-900],
    "header_alone": png(0)[:33],
    "signature_alone": png(0)[:8],
    "one_byte": b"\x89",
    "empty": b"",
    "damaged_png": damaged(png(0)),
    "bomb": png_of(60_000, 60_000),
    "wide_bomb": png_of(2**31 - 1, 1),
    "over_the_limit": encoded(picture(0, 1, MAX_PIXELS + 1)),
    "no_width": png_of(0, 10),
    "no_height": png_of(10, 0),
    "no_pixels": png_of(10, 10),
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n\xff",
    "pdf": b"%PDF-1.7\n\xff\xfe",
    "zeros": bytes(300),
    "noise": bytes(range(256)) * 3,
    "zip": b"PK\x03\x04" + bytes(100),
    "mp4": b"\0\0\0 ftypisom" + bytes(100),
}
NAMES = {
    "missing": "nothing.png",
    "parent": "../secret.png",
    "absolute": "/etc/passwd",
    "absolute_elsewhere": "{outside}",
    "link_out": "link.png",
    "folder": "folder",
    "folder_of_links": "linked/secret.png",
    "fifo": "fifo.png",
    "device": "/dev/zero",
    "too_long": "x" * 5000 + ".png",
    "long_name": "x" * 300 + ".png",
    "http": "http://127.0.0.1/a.png",
    "https": "https://127.0.0.1/a.png",
    "file_url": "file:///etc/passwd",
    "data_without_comma": "data:image/png;base64",
    "data_not_base64": "data:image/png;base64,!!!",
    "data_not_an_image": "data:text/plain,hello",
    "text_file": "note.txt",
    "tilde": "~/secret.png",
    "dots": "folder/../../secret.png",
}
GOOD = {
    "gray": encoded(picture(1).convert("L")),
    "gray_alpha": encoded(picture(1).convert("LA")),
    "palette": encoded(picture(1).convert("P")),
    "one_bit": encoded(picture(1).convert("1")),
    "alpha": encoded(picture(1).convert("RGBA")),
    "cmyk": encoded(picture(1).convert("CMYK"), "JPEG"),
    "sixteen_bit": encoded(Image.new("I;16", (30, 30), 40_000)),
    "progressive": encoded(picture(1), "JPEG", progressive=True),
    "animated": encoded(
        picture(1, 30, 40), "GIF", save_all=True, append_images=[picture(2, 30, 40)]
    ),
    "one_pixel": encoded(picture(1, 1, 1)),
    "icon": encoded(picture(1, 32, 32), "ICO"),
    "webp": WEBP,
    "tiff": TIFF,
    "bmp": BMP,
}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_folder("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a folder with files, links and a FIFO for paths to name."""
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(png(0))
    (root / "note.txt").write_text("not an image")
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "linked").symlink_to(tmp_path)
    (root / "inner.png").symlink_to(root / "good.png")
    (root / "good.png").write_bytes(png(1))
    os.mkfifo(root / "fifo.png")
    return root


def test_each_bad_image_is_an_error_of_its_row(root: Path, llava: Path) -> None:
    names = [name.format(outside=root.parent / "secret.png") for name in NAMES.values()]
    bad_cells = [*((data, None) for data in BROKEN.values()), *((None, name) for name in names)]
    good_names = ["good.png", str(root / "good.png"), "inner.png"]
    good_cells = [*((None, name) for name in good_names), *((data, None) for data in GOOD.values())]
    files, paths = zip(*bad_cells, *good_cells, strict=True)
    rows = pa.table(
        {"text": ["Look"] * len(files), "file": pa.array(files, pa.binary()), "path": list(paths)}
    )
    prompt = {"images": ["file", "path"], "max_image_pixels": MAX_PIXELS}
    spec = job(root, llava, rows, prompt=prompt)
    assert run_job(spec, quiet=True) is ExitCode.OK
    done = results(root)
    kinds = dict(zip([*BROKEN, *NAMES], done, strict=False))
    failed = {kind: row["error"] for kind, row in kinds.items()}
    assert {kind for kind, error in failed.items() if error is None} == set()
    assert {error["code"] for error in failed.values()} == {"invalid_image"}
    assert all(error["message"] for error in failed.values())
    assert [row["error"] for row in done[len(bad_cells) :]] == [None] * len(good_cells)


def test_the_type_of_a_column_tells_images_from_paths(root: Path, llava: Path) -> None:
    """A picture in text form has only printable bytes, and so may a path of type binary."""
    picture_in_text = b"P1 2 2 0 1 1 0 "
    (root / "P1 2 2 0 1 1 0 ").write_bytes(png(1))
    rows = pa.table(
        {
            "text": [*"abc"],
            "file": pa.array([picture_in_text, b"good.png", None], pa.binary()),
            "path": pa.array([None, None, picture_in_text.decode()], pa.large_string()),
        }
    )
    spec = job(root, llava, rows, prompt={"images": ["file", "path"]})
    assert run_job(spec, quiet=True) is ExitCode.OK
    errors = [row["error"] for row in results(root)]
    assert [error and error["code"] for error in errors] == [None, "invalid_image", None]
    assert "it begins with b'good.png'" in errors[1]["message"]


@pytest.mark.parametrize(
    ("kind", "cell"),
    [
        (pa.binary(), png(1)),
        (pa.list_(pa.binary()), [png(1)]),
        (HUB_IMAGE, {"bytes": png(1), "path": "b.png"}),
    ],
    ids=["bytes", "list", "struct"],
)
def test_a_template_cannot_print_images(
    root: Path, llava: Path, kind: pa.DataType, cell: Any
) -> None:
    rows = pa.table({"text": ["a"], "image": pa.array([cell], kind)})
    prompt = {"column": None, "template": "{{ text }} {{ image }}"}
    assert run_job(job(root, llava, rows, prompt=prompt), quiet=True) is ExitCode.OK
    (row,) = results(root)
    assert row["error"]["code"] == "unsupported_content"
    assert row["error"]["message"] == "column image holds an image, which a template cannot print"


def test_a_template_can_read_the_path_beside_an_image(root: Path, llava: Path) -> None:
    cell = {"bytes": png(1), "path": "b.png"}
    rows = pa.table({"text": ["a"], "image": pa.array([cell], HUB_IMAGE)})
    prompt = {"column": None, "template": "{% if image.bytes %}{{ image.path }}{% endif %}"}
    include = {"path": str(root / "out"), "include": ["prompt"], "rows_per_part": 3}
    spec = job(root, llava, rows, prompt=prompt, output=include)
    assert run_job(spec, quiet=True) is ExitCode.OK
    (row,) = results(root)
    assert "b.png" in row["prompt"]


def test_an_image_that_vanishes_is_an_error_of_its_row(
    root: Path, llava: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image of two rows is decoded twice, because its embeddings are not kept."""
    monkeypatch.setattr("batchinfer.builders.engine.EMBEDDING_BYTES", 0)
    forward = VisionTower.forward

    def forward_and_remove(tower: VisionTower, inputs: Any) -> Any:
        (root / "good.png").unlink(missing_ok=True)
        return forward(tower, inputs)

    monkeypatch.setattr(VisionTower, "forward", forward_and_remove)
    (root / "other.png").write_bytes(png(2))
    names = ["good.png", "good.png", "other.png", None]
    rows = pa.table({"text": [*"abcd"], "image": names})
    engine = {"max_num_seqs": 1, "order": "input", "enable_prefix_caching": False}
    assert run_job(job(root, llava, rows, engine=engine), quiet=True) is ExitCode.OK
    errors = [row["error"] for row in results(root)]
    assert [error and error["code"] for error in errors] == [None, "invalid_image", None, None]
    assert "can no longer be read" in errors[1]["message"]
    assert "good.png: No such file" in errors[1]["message"]


def test_too_many_bad_images_fail_the_job(root: Path, llava: Path) -> None:
    cells = [png(0), b"nothing", png(1)]
    rows = pa.table({"text": ["Look"] * 3, "image": pa.array(cells, pa.binary())})
    spec = job(root, llava, rows, errors={"max_error_rate": 0.1})
    assert run_job(spec, quiet=True) is ExitCode.TOO_MANY_ROW_ERRORS
    assert pq.read_table(root / "out" / "data").num_rows == 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright(orientation: int) -> None:
    stored = picture(5, 20, 30)
    exif = Image.Exif()
    exif[0x0112] = orientation
    opened = OpenImage(encoded(stored, "JPEG", exif=exif, quality=95), MAX_PIXELS, "")
    assert opened.size == ((20, 30) if orientation < 5 else (30, 20))
    upright = opened.pixels()
    assert (upright.height, upright.width) == opened.size
    corner = {1: (0, 0), 2: (29, 0), 3: (29, 19), 4: (0, 19)}
    corner |= {5: (0, 0), 6: (19, 0), 7: (19, 29), 8: (0, 29)}
    first = Image.open(io.BytesIO(encoded(stored, "JPEG", quality=95))).getpixel((0, 0))
    assert upright.getpixel(corner[orientation]) == first


def test_data_urls_hold_images() -> None:
    url = "data:image/png;base64," + base64.b64encode(png(0)).decode()
    assert ImageFiles().in_cell(url, "x") == [ImageFile(png(0))]
    assert ImageFiles().in_cell(url.encode(), "x") == [ImageFile(png(0))]
    upper = url.replace("data", "DATA").replace("base64", "BASE64")
    assert ImageFiles().in_cell(upper, "x") == [ImageFile(png(0))]


def test_a_data_url_without_its_encoding_is_named() -> None:
    url = "data:image/png," + base64.b64encode(png(0)).decode()
    with pytest.raises(RowError, match=r"x: .*its data is base64, but ;base64 is missing"):
        ImageFiles().in_cell(url, "x")
    assert ImageFiles().in_cell(f"data:,{quote(png(0))}", "x") == [ImageFile(png(0))]


def test_the_scheme_of_a_url_may_have_capitals(root: Path) -> None:
    files = MediaFiles(str(root))
    (file,) = files.in_cell(f"File://{root}/good.png", "x")
    assert file.read() == png(1)
    with pytest.raises(RowError, match="is a web address"):
        files.in_cell("HTTP://127.0.0.1/a.png", "x")


def test_bad_paths_leave_no_descriptors_open(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in ("folder", "nothing.png", "fifo.png"):
        (file,) = MediaFiles(str(root)).in_cell(name, "x")
        with pytest.raises(RowError):
            file.read()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_struct_of_nulls_is_no_image() -> None:
    files = ImageFiles()
    assert files.in_cell([{"bytes": None, "path": None}, None], "x") == []
    for empty in ("", b"", {"bytes": b"", "path": "a.png"}, {"bytes": b"", "path": None}):
        with pytest.raises(RowError, match="is empty"):
            files.in_cell(empty, "x")


def test_messages_do_not_repeat_long_values(root: Path) -> None:
    """A data URL after a space is a path."""
    (file,) = MediaFiles(str(root)).in_cell(" data:image/png;base64," + "A" * 10**6, "x")
    with pytest.raises(RowError, match="is not an image") as raised:
        file.read()
    assert len(raised.value.message) < 250


def test_messages_show_the_end_of_a_long_path(root: Path) -> None:
    """Many paths begin alike."""
    name = "/".join(["folder"] * 40) + "/page-17.png"
    (file,) = MediaFiles(str(root)).in_cell(name, "x")
    with pytest.raises(RowError, match=r"\.\.\..*/page-17\.png: No such file"):
        file.read()
    with pytest.raises(RowError, match=r"\.\.\..*/page-17\.png is outside"):
        MediaFiles(str(root)).in_cell("/" + name, "x")


def test_a_tower_that_refuses_pixels_is_not_a_bug(root: Path, llava: Path) -> None:
    rows = pa.table({"text": ["a"], "image": [png(1)]})
    prompt = {"mm_processor_kwargs": {"crop_size": {"height": 16, "width": 16}}}
    with pytest.raises(ModelError, match=r"16.* doesn't match .*32") as raised:
        run_job(job(root, llava, rows, prompt=prompt), quiet=True)
    assert "check prompt.mm_processor_kwargs" in str(raised.value)


def test_a_tower_that_runs_out_of_memory_does_not_blame_the_options() -> None:
    class Body(torch.nn.Linear):
        def get_image_features(self, **_: Any) -> None:
            raise torch.OutOfMemoryError("try setting max_split_size_mb")

    with pytest.raises(torch.OutOfMemoryError):
        VisionTower(Body(1, 1)).forward([{"pixel_values": np.zeros((1, 3, 4, 4), np.float32)}])


def test_a_text_file_is_not_an_image() -> None:
    with pytest.raises(RowError, match="unknown image format"):
        OpenImage(b"some text", MAX_PIXELS, "an image")


@pytest.mark.parametrize("size", [(0, 0), (0, 10), (10, 0)])
def test_a_png_without_pixels_is_named(size: tuple[int, int]) -> None:
    header = b"IHDR" + struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    with pytest.raises(RowError, match="an image has no pixels"):
        OpenImage(b"\x89PNG\r\n\x1a\n" + chunk, MAX_PIXELS, "an image")


def test_names_in_stores_need_a_folder_in_the_store() -> None:
    with pytest.raises(RowError, match=r"is in a store; set input\.media_root"):
        MediaFiles(".").in_cell("s3://lake/a.png", "x")


@pytest.mark.long
def test_an_image_that_is_too_large_for_the_processor_is_a_bad_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of LFM2-VL need a blank picture of the image's size."""
    monkeypatch.setattr("batchinfer.text.processes.limits.BYTES_PER_PIXEL", 1)
    model = make_vision_folder("lfm2_vl", tmp_path / "model")
    rows = pa.table({"text": ["a", "b"], "image": [png_of(9400, 9500), png(1)]})
    assert run_job(job(tmp_path, model, rows), quiet=True) is ExitCode.OK
    first, second = (row["error"] for row in results(tmp_path))
    assert second is None
    assert first["code"] == "invalid_image"
    assert first["message"].startswith("preparing an image needed more than 1024 MiB of memory; ")


@pytest.mark.long
@pytest.mark.parametrize("family", ["mistral3", "lfm2_vl"])
def test_an_image_of_the_largest_size_is_prepared(tmp_path: Path, family: str) -> None:
    model = make_vision_folder(family, tmp_path / "model")
    largest = Image.new("1", (9459, 9459))
    rows = pa.table({"text": ["a"], "image": [encoded(largest)]})
    assert run_job(job(tmp_path, model, rows), quiet=True) is ExitCode.OK
    assert results(tmp_path)[0]["error"] is None


def test_large_images_get_the_memory_that_processors_need() -> None:
    """Mistral 3's processor needs 18 bytes per pixel, the most of all families."""
    most = PromptConfig().max_image_pixels
    assert Limits().for_images(most).memory_bytes > 18 * most + 2**28
    assert Limits().for_images(10**6) == Limits()


def test_the_error_of_a_refused_size_names_width_and_height(tmp_path: Path) -> None:
    model = make_vision_folder("lfm2_vl", tmp_path)
    ids = AutoTokenizer.from_pretrained(model)
    processor = load_image_processor(model, ids.convert_tokens_to_ids("<image>"), {})
    for size in ((1, 4000), (20, 4000)):
        with pytest.raises(RowError, match=f"an image of 4000 x {size[0]} pixels: .*; pad or"):
            processor.replacement(size)
