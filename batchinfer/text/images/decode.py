"""Opens images with Pillow: checks the header first, and decodes pixels only on request."""

from __future__ import annotations

import io
import warnings

from PIL import Image, UnidentifiedImageError

from batchinfer.errors import RowError, one_line
from batchinfer.text.images.files import INVALID_IMAGE

Image.init()
_PICTURES = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO")
"""Raster formats to accept. For some other formats, such as EPS, Pillow starts other programs."""
_FORMATS = tuple(name for name in _PICTURES if name in Image.OPEN)
_ORIENTATION = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Operations that turn a picture upright, keyed by EXIF orientation."""


def _is_png_without_pixels(data: bytes) -> bool:
    """Return True for a PNG of width or height 0, which Pillow does not recognize."""
    is_png = data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR"
    return is_png and bytes(4) in (data[16:20], data[20:24])


class OpenImage:
    """An image whose header has been read.

    Args:
        name: name of the image in error messages.

    Raises:
        RowError: ``invalid_image``: the data is not an image, or it has too many pixels.
    """

    def __init__(self, data: bytes, max_pixels: int, name: str) -> None:
        self._name = name
        try:
            with _NoWarnings():
                self._image = Image.open(io.BytesIO(data), formats=_FORMATS)
                self._turn = _TRANSPOSE.get(self._orientation())
        except UnidentifiedImageError:
            reason = f"{name} has an unknown image format; it begins with {data[:20]!r}"
            if _is_png_without_pixels(data):
                reason = f"{name} has no pixels"
            raise RowError(INVALID_IMAGE, reason) from None
        except Exception as error:  # Pillow raises many types for damaged files
            raise _error(f"the header of {name} cannot be read", error) from None
        _check_size(self._image, max_pixels, name)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the upright picture, in pixels."""
        width, height = self._image.size
        is_on_side = self._turn in (
            Image.Transpose.TRANSPOSE,
            Image.Transpose.TRANSVERSE,
            Image.Transpose.ROTATE_90,
            Image.Transpose.ROTATE_270,
        )
        return (width, height) if is_on_side else (height, width)

    def pixels(self) -> Image.Image:
        """Decode the picture to upright RGB; decode only the first frame of an animation.

        Raises:
            RowError: ``invalid_image``: the data is damaged.
        """
        try:
            with _NoWarnings():
                self._image.load()
                picture = self._image.convert("RGB")
        except MemoryError:
            raise
        except Exception as error:
            raise _error(f"{self._name} cannot be decoded", error) from None
        return picture if self._turn is None else picture.transpose(self._turn)

    def _orientation(self) -> int:
        # Pillow applies the orientation of TIFF files itself. If a PNG has no EXIF data before its
        # pixels, Pillow would decode all pixels to look for EXIF data after them.
        is_known = self._image.format != "TIFF" and (
            self._image.format != "PNG" or "exif" in self._image.info
        )
        return int(self._image.getexif().get(_ORIENTATION, 1)) if is_known else 1


def rgb_of(picture: Image.Image, max_pixels: int, name: str) -> Image.Image:
    """Convert a picture that a caller has opened or made to upright RGB.

    Raises:
        RowError: ``invalid_image``: the picture has no pixels or too many, or its file is damaged.
    """
    _check_size(picture, max_pixels, name)
    try:
        picture.load()  # Pillow itself turns TIFF files upright here
        turn = _TRANSPOSE.get(picture.getexif().get(_ORIENTATION, 1))
        rgb = picture.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:
        raise _error(f"{name} cannot be decoded", error) from None
    return rgb if turn is None else rgb.transpose(turn)


def _check_size(picture: Image.Image, max_pixels: int, name: str) -> None:
    width, height = picture.size
    if not width or not height:
        raise RowError(INVALID_IMAGE, f"{name} has {width} x {height} pixels")
    if width * height > max_pixels:
        raise RowError(
            INVALID_IMAGE,
            f"{name} has {width} x {height} pixels, but max_image_pixels is {max_pixels}; "
            "make the picture smaller",
        )


def _error(what: str, error: Exception) -> RowError:
    return RowError(INVALID_IMAGE, f"{what}: {one_line(error)}")


class _NoWarnings(warnings.catch_warnings):
    """Silences Pillow's warnings and turns off its limit on pixels: ``max_pixels`` replaces it."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
        Image.MAX_IMAGE_PIXELS = None
