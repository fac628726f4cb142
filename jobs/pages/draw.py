"""Draws delivery notes and bar charts, and writes them to Parquet files.

Training pictures and these pictures are disjoint: a checksum assigns each answer to one split.

    python jobs/pages/draw.py        # writes jobs/pages/notes.parquet and charts.parquet
"""

from __future__ import annotations

import io
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont

HERE = Path(__file__).resolve().parent
SEED = 20_261
NUM_ROWS = 128

WIDTH, HEIGHT = 160, 96
NAMES = ("Alder", "Birch", "Cedar", "Dorset", "Elm", "Fjord", "Grove", "Harbor", "Juniper", "Larch")
KINDS = ("Books", "Bikes", "Tools", "Tea", "Lamps", "Paper", "Toys", "Shoes")
GROUND = 82  # y of a chart's horizontal axis
CLEAR = 8  # pixels between the tallest bar and the others, and the shortest bar and the others
LEVELS_STEP = 8  # gray levels are multiples of this number, so that PNG files are small


@dataclass(frozen=True)
class Picture:
    """A picture in gray levels, and what the model should say about it."""

    image: Image.Image
    answer: str


def draw_note(rng: random.Random, split: str) -> Picture:
    """Draw a delivery note; its answer is the JSON text of its order number and boxes."""
    number = _number(rng, split)
    boxes = rng.randrange(1, 100)
    paper, ink = rng.randrange(208, 249), rng.randrange(0, 81)
    image = Image.new("L", (WIDTH, HEIGHT), paper)
    canvas = ImageDraw.Draw(image)
    name = f"{rng.choice(NAMES)} {rng.choice(KINDS)} {rng.choice(('Ltd', 'Inc', '& Co'))}"
    canvas.text(
        (3 + rng.randrange(40), rng.randrange(1, 6)), name, ink, _font(rng.choice((10, 11)))
    )
    lines = [(f"Order {number}", 19), (f"Boxes {boxes}", 46)]
    for text, y in lines:
        font = _font(rng.choice((16, 17, 18)))
        left, _, right, _ = font.getbbox(text)
        x = 3 + rng.randrange(WIDTH - 6 - int(right - left) + 1)
        canvas.text((x, y + rng.randrange(6)), text, ink, font)
    canvas.line((4, 76, WIDTH - 5, 76), ink)
    canvas.text((4 + rng.randrange(60), 78), "Delivery note", ink, _font(10))
    answer = json.dumps({"order": number, "boxes": boxes})
    return Picture(_with_noise(image, rng), answer)


def draw_chart(rng: random.Random, split: str) -> Picture:
    """Draw a chart of three to six bars; its answer is a caption."""
    while True:
        heights = [rng.randrange(12, 73) for _ in range(rng.randrange(3, 7))]
        low, *others, high = sorted(heights)
        is_clear = high - others[-1] >= CLEAR and others[0] - low >= CLEAR
        if is_clear and _is_held_out(str(heights)) == (split == "rows"):
            break
    image = Image.new("L", (WIDTH, HEIGHT), rng.randrange(224, 249))
    canvas = ImageDraw.Draw(image)
    slot = (WIDTH - 24) // len(heights)
    for at, height in enumerate(heights):
        left = 16 + at * slot
        bar = (left, GROUND - height, left + slot - 6, GROUND)
        canvas.rectangle(bar, rng.randrange(60, 161), 0)
    canvas.line((10, 6, 10, GROUND), 0)
    canvas.line((10, GROUND, WIDTH - 4, GROUND), 0)
    tallest, shortest = heights.index(high) + 1, heights.index(low) + 1
    answer = f"{len(heights)} bars; bar {tallest} is the tallest, bar {shortest} the shortest."
    return Picture(_with_noise(image, rng), answer)


def table(draw: Callable[[random.Random, str], Picture], count: int = NUM_ROWS) -> pa.Table:
    """Return rows with distinct answers for notes, or distinct pictures for charts."""
    rng = random.Random(SEED)
    pictures = [draw(rng, "rows") for _ in range(count)]
    images = [
        {"bytes": _png(picture.image), "path": f"{at:05d}.png"}
        for at, picture in enumerate(pictures)
    ]
    cell = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return pa.table(
        {
            "id": [f"{at:05d}" for at in range(count)],
            "image": pa.array(images, cell),
            "expected": [picture.answer for picture in pictures],
        }
    )


def _number(rng: random.Random, split: str) -> str:
    while True:
        number = f"{rng.randrange(10_000):04d}-{rng.randrange(10_000):04d}"
        if _is_held_out(number) == (split == "rows"):
            return number


def _is_held_out(answer: str) -> bool:
    return zlib.crc32(answer.encode()) % 8 == 0


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    loaded = ImageFont.load_default(size)
    if not isinstance(loaded, ImageFont.FreeTypeFont):
        raise RuntimeError("Pillow was built without FreeType, so its font has only one size")
    return loaded


def _with_noise(image: Image.Image, rng: random.Random) -> Image.Image:
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0.0, 3.0, (HEIGHT, WIDTH))
    levels = np.round((np.asarray(image) + noise) / LEVELS_STEP) * LEVELS_STEP
    return Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def main() -> None:
    for name, draw in (("notes", draw_note), ("charts", draw_chart)):
        path = HERE / f"{name}.parquet"
        pq.write_table(table(draw), path, compression="zstd")
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
