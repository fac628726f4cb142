"""Prepares images for a vision tower with the model's processor from transformers."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from batchinfer.errors import RowError, UsageError, one_line
from batchinfer.near_names import meant
from batchinfer.text.images.files import INVALID_IMAGE, ImageMemoryError
from batchinfer.text.images.token_counts import TOKEN_COUNTS

_GROUP = "images_kwargs"
Inputs = dict[str, npt.NDArray[Any]]
_TRIALS = ((64, 48), (48, 200), (330, 210), (300, 1200))
"""Sizes [height, width] of blank images, used to test whether ``_Repeated`` applies."""


@dataclass(frozen=True)
class _Repeated:
    """Replacement texts that repeat one token between a fixed beginning and a fixed end."""

    before: str
    token: str
    after: str

    def of(self, num_tokens: int) -> str:
        return self.before + self.token * num_tokens + self.after


class ImageProcessor:
    """Prepares images for a vision tower.

    Args:
        processor: transformers' processor of the model.
        token_id: id of the token that the embeddings of an image replace.
        kwargs: the job's ``prompt.mm_processor_kwargs``.

    Raises:
        UsageError: ``kwargs`` names an option that the processor does not have.
        TypeError, ValueError, StrictDataclassError: ``kwargs`` do not fit the processor.
    """

    def __init__(self, processor: Any, token_id: int, kwargs: Mapping[str, Any]) -> None:
        self._processor = processor
        merged = processor._merge_kwargs(tokenizer_init_kwargs={}, **_options(processor, kwargs))
        self._kwargs = {**merged[_GROUP], "return_tensors": "np"}
        if hasattr(processor, "use_image_special_tokens"):  # LFM2-VL
            self._kwargs["use_image_special_tokens"] = processor.use_image_special_tokens
        self.placeholder: str = processor.image_token
        """Text that a chat template writes for an image."""
        self._token = processor.tokenizer.convert_ids_to_tokens(token_id)
        self._replacement = functools.lru_cache(maxsize=4096)(self._computed_replacement)
        self._repeated = self._find_repeated()

    def replacement(self, size: tuple[int, int]) -> str:
        """Return the text that replaces the placeholder of an image.

        Args:
            size: height and width of the image in pixels.

        Raises:
            RowError: ``invalid_image``: the processor refuses the size.
        """
        return self._replacement(size)

    def num_tokens(self, size: tuple[int, int]) -> int:
        return self.replacement(size).count(self._token)

    def patches_per_token(self, patch_size: int) -> float:
        """Return about how many patches of ``patch_size`` pixels a side make an image token."""
        size = _TRIALS[-1]
        arrays = self.inputs(_blank(size), self.num_tokens(size))
        pixels = [array for name, array in arrays.items() if name.startswith("pixel_values")]
        return sum(_num_patches(array, patch_size) for array in pixels) / self.num_tokens(size)

    def inputs(self, picture: Image.Image, num_tokens: int) -> Inputs:
        """Return the arguments of the vision tower for one picture.

        Args:
            num_tokens: number of image tokens in the prompt.

        Raises:
            RowError: ``invalid_image``: the processor refuses the picture, or returns a different
                number of embeddings.
        """
        inputs, (text,) = self._processed(picture)
        if text.count(self._token) != num_tokens:
            raise RowError(
                INVALID_IMAGE,
                f"the model's processor turns an image into {text.count(self._token)} tokens, but "
                f"its size predicts {num_tokens}",
            )
        # ``model_input_names`` of DeepSeek-OCR-2 lacks the tiles.
        names = (*self._processor.image_processor.model_input_names, "pixel_values_local")
        unused = self._processor.unused_input_names
        return {
            name: np.asarray(inputs[name])
            for name in names
            if name in inputs and name not in unused
        }

    def _processed(self, picture: Image.Image) -> tuple[Mapping[str, Any], list[str]]:
        """Return the processor's outputs for a picture, and its replacement text."""
        try:
            inputs, texts = self._processor._process_images([picture], **self._kwargs)
        except (ValueError, ArithmeticError, OverflowError) as error:
            raise _refused((picture.height, picture.width), error) from None
        except MemoryError:
            raise ImageMemoryError from None
        return inputs, texts

    def _computed_replacement(self, size: tuple[int, int]) -> str:
        if self._repeated is not None:
            return self._repeated.of(self._counted(size))
        try:
            blank = _blank(size)
        except MemoryError:
            raise ImageMemoryError from None
        return self._processed(blank)[1][0]

    def _counted(self, size: tuple[int, int]) -> int:
        try:
            return self._count_of(size)
        except (ValueError, ArithmeticError) as error:
            raise _refused(size, error) from None

    def _count_of(self, size: tuple[int, int]) -> int:
        kwargs = {name: value for name, value in self._kwargs.items() if name != "return_tensors"}
        count = TOKEN_COUNTS.get(type(self._processor).__name__)
        if count is not None:
            return count(self._processor, size, kwargs)
        counted = self._processor._get_num_multimodal_tokens(image_sizes=[size], **kwargs)
        return int(counted["num_image_tokens"][0])

    def _find_repeated(self) -> _Repeated | None:
        """Check whether every replacement text is one repeated token between a fixed beginning and
        a fixed end, and return these parts. Return None if the texts differ; the processor must
        then make each text from a blank image of the same size.

        Raises:
            ValueError: the processor refuses all pictures.
        """
        texts, refusals = {}, []
        for size in _TRIALS:
            try:
                _, (text,) = self._processor._process_images([_blank(size)], **self._kwargs)
                texts[size] = text
            except (ValueError, ArithmeticError) as error:  # without do_resize, some sizes fail
                refusals.append(error)
        if not texts:
            raise ValueError(one_line(refusals[0])) from refusals[0]
        if refusals:
            return None
        found = None
        for size, text in texts.items():
            before, token, rest = text.partition(self._token)
            after = rest.rpartition(self._token)[2] if self._token in rest else rest
            form = _Repeated(before, token, after)
            try:
                is_right = form.of(self._counted(size)) == text
            except (RowError, KeyError, AttributeError, TypeError, NotImplementedError):
                return None  # the processor cannot count tokens
            if not is_right or found not in (None, form):
                return None
            found = form
        return found


def _num_patches(pixels: npt.NDArray[Any], patch_size: int) -> int:
    """Count the patches in images [..., channels, height, width] or in flattened patches [...,
    values per patch]."""
    if pixels.ndim < 4:
        return math.prod(pixels.shape[:-1])
    num_pixels = math.prod(pixels.shape[:-3]) * math.prod(pixels.shape[-2:])
    return num_pixels // patch_size**2


def _options(processor: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the image processor's options from ``kwargs``. As in transformers, the options may
    also be in a nested mapping ``images_kwargs``.

    Raises:
        UsageError: an option is unknown; transformers would ignore it.
    """
    known = set(processor.image_processor.valid_kwargs.__annotations__)
    if hasattr(processor, "valid_processor_kwargs"):
        known |= set(processor.valid_processor_kwargs.__annotations__[_GROUP].__annotations__)
    options = {**kwargs, **kwargs.get(_GROUP, {})}
    options.pop(_GROUP, None)
    for name in options:
        if name not in known:
            near = meant(name, sorted(known)) or f"its options are: {', '.join(sorted(known))}"
            raise UsageError(
                "prompt.mm_processor_kwargs: the model's image processor has no option "
                f"{name!r}; {near}"
            )
    return options


def _refused(size: tuple[int, int], error: Exception) -> RowError:
    """Return the error of an image whose size the processor does not accept."""
    height, width = size
    return RowError(
        INVALID_IMAGE,
        f"the model's processor refuses an image of {width} x {height} pixels: "
        f"{one_line(error).rstrip('.')}; pad or resize the picture",
    )


def _blank(size: tuple[int, int]) -> Image.Image:
    return Image.new("RGB", (size[1], size[0]))
