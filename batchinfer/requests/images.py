"""Assigns numbers to the images of prompts, and loads pixels before the engine needs them.

Equal images have the same number, so their prompts share KV blocks. Pixels take much memory, so
``ImageLoader`` limits how many bytes it decodes in advance, and nothing keeps the pixels after the
vision tower has embedded the image.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Condition
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.engine.images import Image, LostImageError, PromptImage
from batchinfer.errors import RowError
from batchinfer.requests.requests import PromptRow
from batchinfer.text.images.files import INVALID_IMAGE
from batchinfer.text.images.image_placeholders import ImageSettings, RowImage
from batchinfer.text.images.pixels import PixelBuilder
from batchinfer.text.images.shared_arrays import SharedArrays
from batchinfer.text.processes.pool import TextProcesses
from batchinfer.text.prompts import Prompt
from batchinfer.text.tokenizer import TokenIds

PIXEL_BYTES = 1 << 30
"""Limit, in bytes, on decoded images that wait for the vision tower. While these images exceed the
limit, no further rows are decoded."""
REMEMBERED = 1 << 15
"""Number of distinct images whose numbers are kept after their rows are finished."""
ROWS_AHEAD = 32
"""Number of rows whose images are decoded at the same time."""
_POLL_S = 0.1

Inputs = Mapping[str, npt.NDArray[Any]]
FinishLoading = Callable[[], tuple[PromptImage, ...]]


class ImageNumbers:
    """Assigns numbers to images: equal images get equal numbers, other images different numbers.

    A later window of rows thus finds the KV blocks and embeddings of an image that an earlier
    window used. An image that appears again gets a new number only if no row holds the image and
    ``remembered`` other images were used since.

    Args:
        numbers: numbers that nothing else uses; default: from 0.
    """

    def __init__(self, remembered: int = REMEMBERED, numbers: Iterator[int] | None = None) -> None:
        self._by_key: weakref.WeakValueDictionary[bytes, RowImage] = weakref.WeakValueDictionary()
        self._number_of: OrderedDict[bytes, int] = OrderedDict()
        """Numbers by key, in the order of their last use."""
        self._remembered = remembered
        self._numbers = itertools.count() if numbers is None else numbers

    def numbered(self, prompt: Prompt) -> Prompt:
        """Number the images of a prompt, and give each image token the id of its image."""
        if not prompt.images:
            return prompt
        images = tuple(map(self._canonical, prompt.images))
        at = np.flatnonzero(prompt.token_ids < 0)
        token_ids = prompt.token_ids.copy()
        numbers = np.array([image.number for image in images], np.int32)
        token_ids[at] = -1 - numbers[-1 - token_ids[at]]
        return replace(prompt, token_ids=token_ids, images=images)

    def _canonical(self, image: RowImage) -> RowImage:
        """Return the same object for all equal images, so that memory holds their bytes once."""
        known = self._by_key.get(image.key)
        if known is None:
            number = self._number_of.get(image.key)
            known = replace(image, number=next(self._numbers) if number is None else number)
            self._by_key[image.key] = known
        self._number_of[known.key] = known.number
        self._number_of.move_to_end(known.key)
        if len(self._number_of) > self._remembered:
            self._number_of.popitem(last=False)
        return known


class ImageLoader:
    """Loads the pixels of rows' images in worker processes, in the order of the rows.

    Args:
        is_over: returns True once no more rows are needed.
    """

    def __init__(
        self,
        processes: TextProcesses,
        settings: ImageSettings,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._decode = processes.prompts(partial(PixelBuilder, settings)).start
        self._settings = settings
        self._is_over = is_over
        self._loaded: weakref.WeakValueDictionary[int, Image] = weakref.WeakValueDictionary()
        """Images that a row or the engine holds, keyed by number."""
        self._loading: weakref.WeakValueDictionary[int, _Loading] = weakref.WeakValueDictionary()
        """Images that are being decoded, by number."""
        self._waiting_bytes = 0
        self._freed = Condition()

    def loaded(self, batches: Iterator[list[PromptRow]]) -> Iterator[list[PromptRow]]:
        """Set ``PromptRow.images`` of the rows of ``batches``, and yield the rows in order.

        A row whose image cannot be decoded gets the error ``invalid_image``.
        """
        for batch in batches:
            if not any(_images_of(row) for row in batch):
                yield batch
                continue
            rows, started = deque(batch), deque[tuple[PromptRow, FinishLoading]]()
            batch.clear()  # otherwise, finished rows would keep their pixels
            while rows:
                self._wait_for_memory()
                row = rows.popleft()
                started.append((row, self.start(_images_of(row), row.token_ids)))
                if len(started) >= ROWS_AHEAD:
                    yield [_finished(*started.popleft())]
            while started:
                yield [_finished(*started.popleft())]

    def start(
        self, images: Sequence[RowImage], token_ids: TokenIds, *, saves_memory: bool = False
    ) -> FinishLoading:
        """Start to load the images of a prompt.

        Args:
            saves_memory: True to drop pixels beyond ``PIXEL_BYTES``, and decode them again when
                they are needed.

        Returns:
            A function that waits and returns the images. The function raises ``RowError``
            (``invalid_image``) if an image cannot be decoded.
        """
        parts = [self._loaded.get(one.number) or self._load(one, saves_memory) for one in images]

        def finish() -> tuple[PromptImage, ...]:
            loaded = [part.result() if isinstance(part, _Loading) else part for part in parts]
            return _placed(loaded, token_ids)

        return finish

    def _load(self, image: RowImage, saves_memory: bool) -> _Loading:
        loading = self._loading.get(image.number)
        if loading is None:
            wait = self._decode([{"image": image}])
            loading = _Loading(wait, partial(self._made, image, saves_memory=saves_memory))
            self._loading[image.number] = loading
        return loading

    def _wait_for_memory(self) -> None:
        with self._freed:
            while self._waiting_bytes > PIXEL_BYTES and not self._is_over():
                self._freed.wait(_POLL_S)

    def _made(self, image: RowImage, arrays: SharedArrays, *, saves_memory: bool) -> Image:
        waiting = []
        if not saves_memory or self._waiting_bytes < PIXEL_BYTES:
            with self._freed:
                self._waiting_bytes += arrays.num_bytes
            weakref.finalize(arrays.memory, self._release, arrays.num_bytes)
            waiting.append(arrays)

        def load_inputs() -> Inputs:
            """Return the arrays without keeping them. Later calls decode the image again."""
            return (waiting.pop() if waiting else self._again(image)).arrays()

        settings = self._settings
        made = Image(
            image.number,
            load_inputs,
            image.num_tokens,
            _grid(arrays.arrays(), settings.merge_size),
            settings.attends_both_ways,
        )
        self._loaded[image.number] = made
        return made

    def _again(self, image: RowImage) -> SharedArrays:
        (result,) = self._decode([{"image": image}])()
        if isinstance(result, RowError):
            reason = f"an image can no longer be read: {_about_image(result).message}"
            raise LostImageError(-1 - image.number, reason)
        assert isinstance(result, SharedArrays)
        return result

    def _release(self, num_bytes: int) -> None:
        with self._freed:
            self._waiting_bytes -= num_bytes
            self._freed.notify_all()


class _Loading:
    """An image whose pixels are being decoded. All prompts that wait for it share this object.

    Args:
        wait: waits for the ``SharedArrays`` or the error of one image.
        make: makes the image from its arrays.
    """

    def __init__(
        self, wait: Callable[[], Sequence[object]], make: Callable[[SharedArrays], Image]
    ) -> None:
        self._wait: Callable[[], Sequence[object]] | None = wait
        self._make = make
        self._result: Image | RowError

    def result(self) -> Image:
        """Wait for the image.

        Raises:
            RowError: ``invalid_image``.
        """
        if self._wait is not None:
            (decoded,) = self._wait()
            self._wait = None  # the function would keep the decoded arrays in memory
            if isinstance(decoded, RowError):
                self._result = _about_image(decoded)
            else:
                assert isinstance(decoded, SharedArrays)
                self._result = self._make(decoded)
        if isinstance(self._result, RowError):
            raise self._result
        return self._result


def _images_of(row: PromptRow) -> tuple[RowImage, ...]:
    return row.prompt.images if isinstance(row.prompt, Prompt) else ()


def _grid(inputs: Inputs, merge_size: int | None) -> tuple[int, int] | None:
    """Return the rows and columns of an image's tokens; None for models without grids."""
    if merge_size is None:
        return None
    ((_, rows, columns),) = inputs["image_grid_thw"].tolist()
    return rows // merge_size, columns // merge_size


def _finished(row: PromptRow, finish: FinishLoading) -> PromptRow:
    try:
        row.images = finish()
    except RowError as error:
        row.prompt = RowError(error.code, error.message)
    return row


def _placed(images: Sequence[Image], token_ids: TokenIds) -> tuple[PromptImage, ...]:
    """Return the images of a prompt with the positions of their tokens."""
    if not images:
        return ()
    at = np.flatnonzero(token_ids < 0).astype(np.int32)
    ends = np.cumsum([image.num_tokens for image in images])
    return tuple(
        PromptImage(image, positions)
        for image, positions in zip(images, np.split(at, ends[:-1]), strict=True)
    )


def _about_image(error: RowError) -> RowError:
    """Return an error about the image. If a worker dies or times out, the original error blames the
    template or the tokenizer, which workers usually run."""
    if error.code == INVALID_IMAGE:
        return error
    message = error.message.replace("the template", "decoding an image")
    return RowError(INVALID_IMAGE, message.replace("the tokenizer", "decoding an image"))
