"""The processor of Pixtral and Mistral 3.

transformers' own class cannot be imported without torchvision. This class does the same as
transformers' ``PixtralProcessor`` (models/pixtral/processing_pixtral.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL import Image


class PixtralProcessor:
    """Has the methods that ``ImageProcessor`` calls, with settings of ``processor_config.json``."""

    unused_input_names: tuple[str, ...] = ()

    def __init__(self, image_processor: Any, tokenizer: Any, **settings: Any) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.image_token: str = settings.get("image_token", "[IMG]")
        self._break_token: str = settings.get("image_break_token", "[IMG_BREAK]")
        self._end_token: str = settings.get("image_end_token", "[IMG_END]")
        self._patch_size = settings.get("patch_size", 16) * settings.get("spatial_merge_size", 1)

    def _merge_kwargs(
        self, tokenizer_init_kwargs: Mapping[str, Any], **kwargs: Any
    ) -> dict[str, dict[str, Any]]:
        return {"images_kwargs": kwargs}

    def _process_images(
        self, pictures: list[Image.Image], **kwargs: Any
    ) -> tuple[Mapping[str, Any], list[str]]:
        inputs = self.image_processor(pictures, **{**kwargs, "patch_size": self._patch_size})
        return inputs, [self._text(*size) for size in inputs["image_sizes"].tolist()]

    def _text(self, height: int, width: int) -> str:
        """Return the text of an image: a token for each merged patch, and breaks between the
        rows."""
        row = self.image_token * (width // self._patch_size)
        return self._break_token.join([row] * (height // self._patch_size)) + self._end_token
