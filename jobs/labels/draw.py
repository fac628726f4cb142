"""Draws shipping labels with a printed order number, and writes them to a Parquet file.

`labels.parquet` and the training labels have no order number in common: a checksum assigns each
number to one of the two splits.

    python jobs/labels/draw.py        # writes jobs/labels/labels.parquet
"""

from __future__ import annotations

import argparse
import io
import random
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont

HERE = Path(__file__).resolve().parent
LABELS_PATH = HERE / "labels.parquet"
LABELS_SEED = 20_260
NUM_LABELS = 256

WIDTH, HEIGHT = 160, 48
NUMBER_SIZES = (16, 17, 18)
NAME_SIZES = (10, 11)
MARGIN = 3
NAMES = ("Alder", "Birch", "Cedar", "Dorset", "Elm", "Fjord", "Grove", "Harbor", "Juniper", "Larch")
KINDS = ("Books", "Bikes", "Tools", "Tea", "Lamps", "Paper", "Toys", "Shoes")
LEVELS_STEP = 8  # gray levels are multiples of this number, so that PNG files are small


@dataclass(frozen=True)
class Label:
    """A picture in gray levels, and the order number printed on it."""

    image: Image.Image
    order_number: str
    digits_at: list[tuple[int, int]]  # x and y of the center of each digit


@cache
def font(size: int) -> ImageFont.FreeTypeFont:
    loaded = ImageFont.load_default(size)
    if not isinstance(loaded, ImageFont.FreeTypeFont):
        raise RuntimeError("Pillow was built without FreeType, so its font has only one size")
    return loaded


def is_held_out(number: str) -> bool:
    return zlib.crc32(number.encode()) % 8 == 0


def draw_number(rng: random.Random, split: str) -> str:
    """Draw an order number of a split, `train` or `labels`."""
    while True:
        number = f"{rng.randrange(10_000):04d}-{rng.randrange(10_000):04d}"
        if is_held_out(number) == (split == "labels"):
            return number


def draw_label(rng: random.Random, split: str) -> Label:
    """Draw a label with an order number of a split."""
    paper, ink = rng.randrange(208, 249), rng.randrange(0, 81)
    image = Image.new("L", (WIDTH, HEIGHT), paper)
    canvas = ImageDraw.Draw(image)
    name = f"{rng.choice(NAMES)} {rng.choice(KINDS)} {rng.choice(('Ltd', 'Inc', '& Co'))}"
    corner = (MARGIN + rng.randrange(40), rng.randrange(1, 6))
    canvas.text(corner, name, fill=ink, font=font(rng.choice(NAME_SIZES)))

    number = draw_number(rng, split)
    text, number_font = f"Order {number}", font(rng.choice(NUMBER_SIZES))
    left, top, right, bottom = number_font.getbbox(text)
    x = MARGIN + rng.randrange(WIDTH - 2 * MARGIN - int(right - left) + 1)
    y = rng.randrange(17, 25)
    canvas.text((x, y), text, fill=ink, font=number_font)

    noise = np.random.default_rng(rng.getrandbits(32)).normal(0.0, 3.0, (HEIGHT, WIDTH))
    levels = np.round((np.asarray(image) + noise) / LEVELS_STEP) * LEVELS_STEP
    digits_at = [
        (
            x + int(sum(number_font.getlength(text[:end]) for end in (at, at + 1)) / 2),
            y + int(top + bottom) // 2,
        )
        for at, character in enumerate(text)
        if character.isdigit()
    ]
    return Label(Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8)), number, digits_at)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def labels_table(seed: int = LABELS_SEED, num_labels: int = NUM_LABELS) -> pa.Table:
    """Return the rows of `labels.parquet`; equal seeds give equal rows, no number occurs twice."""
    rng = random.Random(seed)
    labels: dict[str, Label] = {}
    while len(labels) < num_labels:
        label = draw_label(rng, "labels")
        labels.setdefault(label.order_number, label)
    ids = [f"label-{at:05d}" for at in range(num_labels)]
    images = [
        {"bytes": png(label.image), "path": f"{name}.png"}
        for name, label in zip(ids, labels.values(), strict=True)
    ]
    cell = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return pa.table(
        {"id": ids, "image": pa.array(images, cell), "order_number": list(labels)},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw labels with order numbers.")
    parser.add_argument("--output", type=Path, default=LABELS_PATH)
    parser.add_argument("--rows", type=int, default=NUM_LABELS)
    parser.add_argument("--seed", type=int, default=LABELS_SEED)
    args = parser.parse_args()
    table = labels_table(args.seed, args.rows)
    pq.write_table(table, args.output, compression="zstd")
    print(f"{args.output}: {table.num_rows} rows, {args.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
