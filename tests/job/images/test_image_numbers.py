"""Images get numbers by their keys."""

from __future__ import annotations

import gc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.requests.images import ImageNumbers
from batchinfer.text.images.files import ImageFile
from batchinfer.text.images.image_placeholders import RowImage
from batchinfer.text.prompts import Prompt


def prompt(*keys: int) -> Prompt:
    """Return a prompt with one token for each image."""
    images = tuple(RowImage(bytes([key]), ImageFile(b""), (8, 8), 1, 99) for key in keys)
    token_ids = -1 - np.arange(len(keys), dtype=np.int32)
    return Prompt(token_ids, None, False, False, images=images)


@given(
    rows=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=30),
    remembered=st.integers(0, 5),
    held=st.integers(0, 4),
)
def test_a_number_never_means_two_images(rows: list[list[int]], remembered: int, held: int) -> None:
    numbers, image_of, holding = ImageNumbers(remembered), dict[int, bytes](), list[Prompt]()
    for keys in rows:
        numbered = numbers.numbered(prompt(*keys))
        holding = [*holding, numbered][-held:] if held else []
        assert numbered.token_ids.tolist() == [-1 - image.number for image in numbered.images]
        for image in numbered.images:
            assert image_of.setdefault(image.number, image.key) == image.key
        for one in holding:
            for image in one.images:
                (again,) = numbers.numbered(prompt(image.key[0])).images
                assert again is image


def test_the_last_images_are_remembered() -> None:
    numbers = ImageNumbers(remembered=2)
    first = [numbers.numbered(prompt(key)).images[0].number for key in (0, 1, 0, 2)]
    gc.collect()
    again = [numbers.numbered(prompt(key)).images[0].number for key in (0, 2, 1)]
    assert again[:2] == [first[0], first[3]]
    assert again[2] not in first
