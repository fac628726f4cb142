"""Data types for the images in prompts, for the engine and its steps.

All tokens of an image have the same negative id, which is unique to the image. The prefix index
compares token ids, so two prompts share the KV blocks of an image only if the prompts have the same
tokens before the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


class LostImageError(Exception):
    """An image of a queued or running request can no longer be loaded.

    Args:
        reason: message for the rows that need the image.
    """

    def __init__(self, token_id: int, reason: str) -> None:
        super().__init__(reason)
        self.token_id = token_id
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Image:
    """An image that the model's processor has prepared."""

    number: int
    """Equal images have the same number, and different images have different numbers."""
    load_inputs: Callable[[], Mapping[str, npt.NDArray[Any]]]
    """Returns the arguments of the vision tower for this image, such as ``pixel_values``. The
    arrays are large; keep no reference to the arrays after the image is embedded. Raises
    ``LostImageError``."""
    num_tokens: int
    """Number of embeddings that the vision tower returns."""
    grid: tuple[int, int] | None = None
    """Rows and columns of the image's tokens, for models with multimodal rotary positions (mRoPE).
    None: the model has one rotary position per token."""
    attends_both_ways: bool = False
    """True if adjacent tokens of the image attend to each other in both directions (Gemma 3). One
    step must compute all tokens of such an image."""

    @property
    def token_id(self) -> int:
        """Negative id of the image's tokens."""
        return -1 - self.number


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image and its token positions in one prompt."""

    image: Image
    positions: Int32
    """[``image.num_tokens``] ascending positions in the prompt."""

    @property
    def whole_spans(self) -> tuple[tuple[int, int], ...]:
        """Spans [start, stop) of the prompt in which all tokens attend to each other."""
        if not self.image.attends_both_ways:
            return ()
        runs = np.split(self.positions, np.flatnonzero(np.diff(self.positions) > 1) + 1)
        return tuple((int(run[0]), int(run[-1]) + 1) for run in runs)


@dataclass(frozen=True, slots=True, eq=False)
class StepImage:
    """The tokens of an image that a step computes."""

    image: Image
    first: int
    """Index of the first of these tokens among the image's tokens."""
    indices: Int32
    """Indices of these tokens among the step's packed tokens."""


def rotary_shift(images: Iterable[PromptImage]) -> int:
    """Return the difference between rotary position and token index in the text after the images.

    An image with a grid takes max(rows, columns) positions.
    """
    return sum(max(each.image.grid) - each.image.num_tokens for each in images if each.image.grid)


def rotary_positions(images: tuple[PromptImage, ...], start: int, stop: int) -> Int32:
    """Return the rotary positions [3, stop - start] of the tokens at [start, stop) of a sequence:
    one for time, one for the row and one for the column.

    A text token has three equal positions. If t is the position of an image's first token, the
    token at (row, column) of the image's grid has positions (t, t + row, t + column). Source:
    transformers' ``get_rope_index`` (models/qwen2_vl/modeling_qwen2_vl.py).
    """
    indices = np.arange(start, stop, dtype=np.int32)
    positions = np.tile(indices, (3, 1))
    shift = 0
    for each in images:
        if each.image.grid is None:
            continue
        columns = each.image.grid[1]
        first, end = int(each.positions[0]), int(each.positions[-1]) + 1
        inside = (indices >= first) & (indices < end)
        offsets = indices[inside] - first
        origin = first + shift
        positions[:, inside] = origin + np.stack(
            [np.zeros_like(offsets), offsets // columns, offsets % columns]
        )
        shift += rotary_shift([each])
        positions[:, indices >= end] = indices[indices >= end] + shift
    return positions


def last_cut(images: tuple[PromptImage, ...], stop: int) -> int:
    """Return the largest end <= ``stop`` of a prompt chunk that splits no whole span."""
    spans = (span for each in images for span in each.whole_spans)
    return next((start for start, end in spans if start < stop < end), stop)


def query_ends(images: tuple[PromptImage, ...], start: int, stop: int) -> Int32:
    """Return, for each token at [start, stop) of a sequence, the exclusive end of the positions
    that the token attends to."""
    ends = np.arange(start + 1, stop + 1, dtype=np.int32)
    for first, end in (span for each in images for span in each.whole_spans):
        assert not first < stop < end, "a chunk splits an image that one step must compute"
        ends[max(first - start, 0) : max(end - start, 0)] = end
    return ends


def images_of_chunk(
    images: tuple[PromptImage, ...], start: int, stop: int, packed_start: int
) -> list[StepImage]:
    """Return the images' tokens at positions [start, stop) of a prompt.

    Args:
        packed_start: index of the token at ``start`` among the step's packed tokens.
    """
    found = []
    for each in images:
        first, end = np.searchsorted(each.positions, [start, stop]).tolist()
        if first < end:
            indices = each.positions[first:end] + np.int32(packed_start - start)
            found.append(StepImage(each.image, first, indices))
    return found
