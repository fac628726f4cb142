"""Loads a model's image processor, once per process."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.errors import ModelError, install_command, one_line

if TYPE_CHECKING:
    from batchinfer.text.images.processor import ImageProcessor


def load_image_processor(folder: Path, token_id: int, kwargs: Mapping[str, Any]) -> ImageProcessor:
    """Load the image processor of a model's folder; later calls return the same object.

    Raises:
        ModelError: the folder has no processor, ``kwargs`` do not fit it, or Pillow is missing.
    """
    if find_spec("PIL") is None:
        raise ModelError("images in prompts need Pillow", hint=install_command("images"))
    return _load(folder, token_id, json.dumps(dict(kwargs), sort_keys=True))


_PARTS = (
    *("image_processor", "video_processor", "feature_extractor", "tokenizer"),
    *("processor_class", "auto_map"),
)
"""Keys of processor_config.json that describe a processor's parts and class."""


@functools.cache
def _load(folder: Path, token_id: int, kwargs: str) -> ImageProcessor:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoTokenizer, ProcessorMixin
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    from batchinfer.text.images.processor import ImageProcessor

    try:
        settings = ProcessorMixin.get_processor_dict(folder)[0]
        name = settings.get("processor_class")
        if name is None:
            name = PROCESSOR_MAPPING_NAMES[AutoConfig.from_pretrained(folder).model_type]
        for part in _PARTS:
            settings.pop(part, None)
        processor = _class_of(name)(
            image_processor=_image_processor(folder, name),
            tokenizer=AutoTokenizer.from_pretrained(folder),
            **settings,
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise ModelError(
            f"model.name: {folder}: its image processor cannot be loaded: {one_line(error)}"
        ) from error
    try:
        return ImageProcessor(processor, token_id, json.loads(kwargs))
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        reason = f"{folder}: its image processor cannot be used: {one_line(error)}"
        hint = None if kwargs == "{}" else "check prompt.mm_processor_kwargs"
        raise ModelError(f"model.name: {reason}", hint=hint) from error


def _image_processor(folder: Path, name: str) -> Any:
    from transformers import AutoImageProcessor, ImageProcessingMixin

    from batchinfer.text.images import gemma4_unified
    from batchinfer.text.images.lfm2_vl import Lfm2VlImageProcessorPil
    from batchinfer.text.images.unlimited_ocr import UnlimitedOcrImageProcessorPil

    own: dict[str, Any] = {
        "Lfm2VlProcessor": Lfm2VlImageProcessorPil,
        "UnlimitedOcrProcessor": UnlimitedOcrImageProcessorPil,
    }
    if name in own:
        return own[name].from_pretrained(folder)
    settings = ImageProcessingMixin.get_image_processor_dict(folder)[0]
    if settings.get("image_processor_type") == gemma4_unified.NAME:
        return gemma4_unified.image_processor(settings)
    return AutoImageProcessor.from_pretrained(folder, backend="pil")


def _class_of(name: str) -> Any:
    """Return a processor's class. Parts that its constructor does not get are None."""
    import transformers

    from batchinfer.text.images.pixtral import PixtralProcessor

    if name == PixtralProcessor.__name__:
        return PixtralProcessor
    return _without_checks(getattr(transformers, name))


def _without_checks(processor_class: Any) -> Any:
    """Return a subclass in which missing parts are None.

    The subclass skips transformers' check of the classes of a processor's parts, which needs
    torchvision.
    """

    class Processor(processor_class):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    Processor.__name__ = Processor.__qualname__ = processor_class.__name__
    return functools.partial(Processor, **dict.fromkeys(processor_class.get_attributes()))
