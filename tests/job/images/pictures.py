"""Pictures for tests, encoded."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
from PIL import Image

HUB_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""Type of image columns in datasets of the Hugging Face Hub."""


def picture(number: int, height: int = 0, width: int = 0) -> Image.Image:
    """Return a picture of random pixels; its size depends on its number unless it is given."""
    rng = np.random.default_rng(number)
    size = rng.integers(20, 90, 2) if not height else (height, width)
    return Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    """Return the bytes of an image file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png(number: int) -> bytes:
    """Return a random picture as PNG."""
    return encoded(picture(number))
