"""Rows with images get the same greedy tokens as in transformers, which runs one row at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import AutoModelForImageTextToText

from batchinfer.config import ModelConfig, SamplingParams
from batchinfer.engine.images import (
    Image,
    PromptImage,
    StepImage,
    images_of_chunk,
    last_cut,
    query_ends,
)
from batchinfer.engine.request import Completion, Request
from batchinfer.worker.fusion.native_layers import decoder_layers_of
from batchinfer.worker.loader import LoadedModel, load_model
from batchinfer.worker.vision.image_embeddings import ImageEmbeddings
from batchinfer.worker.vision.tower import load_vision_tower
from tests.parity import CPU, OUTPUT_TOKENS, TIE, Setup, make_engine, run_engine, tokens_of
from tests.vision_models import (
    IMAGE_TOKEN,
    RELATED_FAMILIES,
    VISION_FAMILIES,
    answer_logits,
    image_of_patches,
    make_vision_checkpoint,
    random_image,
)

SETUPS = {
    "plain": Setup(),
    "chunks_of_7": Setup(max_tokens=7, block_size=4),
    "no_prefix_reuse": Setup(caching=False),
    "four_samples": Setup(n=4, block_size=8),
    "small_pool": Setup(block_size=4, pool_tokens=160, misleading=True, n=2),
    "swapped": Setup(block_size=4, pool_tokens=160, misleading=True, num_host_blocks=40),
}
QUICK_SETUPS = ("chunks_of_7", "small_pool")
# Images of each row; equal numbers are equal images. A row without images is text alone.
ROWS = ([0], [0], [], [1], [2, 0], [0, 0], [3, 1, 2, 0], [], [1], [4], [5])
NUM_IMAGES = 6
LISTS = ("num_local_patches", "patches_grid")
"""Arguments of transformers' model that must be lists."""


def setups() -> list[Any]:
    """Return the setups as parameters of tests; only some of them run in every test run."""
    return [
        pytest.param(setup, id=name, marks=() if name in QUICK_SETUPS else pytest.mark.long)
        for name, setup in SETUPS.items()
    ]


class Row:
    """A prompt with images between random tokens. All rows have the same text."""

    def __init__(self, family: str, number: int) -> None:
        rng = np.random.default_rng(5)
        self.images = [random_image(family, image) for image in ROWS[number]]
        parts: list[Any] = [rng.integers(2, IMAGE_TOKEN, 5)]
        for image in self.images:
            parts += [np.full(image.num_tokens, image.token_id), rng.integers(2, IMAGE_TOKEN, 3)]
        self.token_ids = np.concatenate(parts).astype(np.int32)

    def request(self, number: int, params: SamplingParams) -> Request:
        starts = np.flatnonzero(self.token_ids < 0)
        images, at = [], 0
        for image in self.images:
            positions = starts[at : at + image.num_tokens].astype(np.int32)
            images.append(PromptImage(image, positions))
            at += image.num_tokens
        return Request(number, self.token_ids, params, (3, number), images=tuple(images))

    def features(self) -> dict[str, Any]:
        """Return the images as arguments of transformers' model; smaller images are padded."""
        if not self.images:
            return {}
        inputs = [image.load_inputs() for image in self.images]
        if "image_position_ids" in inputs[0]:
            return {
                "pixel_values": _padded([each["pixel_values"] for each in inputs], 0),
                "image_position_ids": _padded([each["image_position_ids"] for each in inputs], -1),
            }
        if "image_sizes" not in inputs[0]:
            return joined(inputs)
        height, width = np.max([each["pixel_values"].shape[2:] for each in inputs], axis=0)
        pixels = [
            functional.pad(x, (0, width - x.shape[3], 0, height - x.shape[2]))
            for x in (torch.from_numpy(each["pixel_values"]) for each in inputs)
        ]
        sizes = [torch.from_numpy(each["image_sizes"]) for each in inputs]
        return {"pixel_values": torch.cat(pixels), "image_sizes": torch.cat(sizes)}


def joined(inputs: list[Mapping[str, npt.NDArray[Any]]]) -> dict[str, Any]:
    """Return the arguments of several images as arguments of transformers' model."""
    names = {name for each in inputs for name in each}
    arrays = {
        name: np.concatenate([each[name] for each in inputs if name in each]) for name in names
    }
    return {
        name: array.tolist() if name in LISTS else torch.from_numpy(array)
        for name, array in arrays.items()
    }


def _padded(arrays: list[npt.NDArray[Any]], value: int) -> torch.Tensor:
    """Join arrays [1, patches, ...], of which the shorter ones are padded with a value."""
    longest = max(array.shape[1] for array in arrays)
    tensors = [torch.from_numpy(array) for array in arrays]
    return torch.cat(
        [functional.pad(x, (0, 0, 0, longest - x.shape[1]), value=value) for x in tensors]
    )


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(str(folder)), device=CPU)


def embeddings(loaded: LoadedModel, num_bytes: int = 2**20) -> ImageEmbeddings:
    tower = load_vision_tower(loaded.folder, loaded.pretrained, loaded.dtype, CPU)
    assert tower is not None
    return ImageEmbeddings(tower, num_bytes, decoder_layers_of(loaded.model))


def run_rows(
    loaded: LoadedModel, setup: Setup, family: str, images: ImageEmbeddings
) -> tuple[dict[int, Completion], int]:
    """Run all rows. Return completions by row, and the number of images that were encoded."""
    engine, scheduler = make_engine(loaded, setup, images)
    params = SamplingParams(
        max_tokens=OUTPUT_TOKENS,
        temperature=0.0,
        n=setup.n,
        # If the model generated this token, transformers would expect another image.
        logit_bias={IMAGE_TOKEN: -100.0},
    )
    if setup.misleading:
        scheduler.output_lengths.observe(np.full(100, 2), np.ones(100, dtype=np.bool_))
    for number in range(len(ROWS)):
        request = Row(family, number).request(number, params)
        engine.add_request(request)
        assert scheduler.max_num_batched_tokens >= request.least_step_tokens
    completions, steps = run_engine(engine, scheduler, setup)
    assert all((step.encode_ms > 0) == (step.images_encoded > 0) for step in steps)
    return completions, sum(step.images_encoded for step in steps)


@torch.no_grad()
def reference_logits(model: Any, row: Row, ids: npt.NDArray[np.integer]) -> torch.Tensor:
    """Return transformers' logits [T, vocabulary] of token ids that begin with a row's prompt."""
    features = row.features()
    is_image = torch.from_numpy(ids == IMAGE_TOKEN)[None].int()
    if features.keys() & {"image_grid_thw", "image_position_ids"}:
        features["mm_token_type_ids"] = is_image
    elif any(image.attends_both_ways for image in row.images):
        features["token_type_ids"] = is_image
    return answer_logits(model, torch.from_numpy(ids)[None], len(row.token_ids), features)


@pytest.mark.parametrize("setup", setups())
def test_greedy_tokens_equal_transformers(
    setup: Setup, family: str, folder: Path, loaded: LoadedModel
) -> None:
    completions, encoded = run_rows(loaded, setup, family, embeddings(loaded))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    assert encoded == NUM_IMAGES
    assert len(completions) == len(ROWS)
    for number, completion in completions.items():
        row = Row(family, number)
        for output in completion.outputs:
            drawn = output.token_ids.tolist()
            ids = np.concatenate([np.where(row.token_ids < 0, IMAGE_TOKEN, row.token_ids), drawn])
            logits = reference_logits(model, row, ids)[-OUTPUT_TOKENS - 1 : -1]
            places = torch.arange(OUTPUT_TOKENS), torch.tensor(drawn)
            # Log-probabilities may differ even if the greedy tokens are equal.
            expected = float(logits.log_softmax(dim=1)[places].sum())
            assert output.cumulative_logprob == pytest.approx(expected, abs=1e-3), number
            logits[:, IMAGE_TOKEN] = -torch.inf
            taken = logits[places]
            assert (logits.max(dim=1).values - taken).max() < TIE, number


@pytest.mark.parametrize("related", RELATED_FAMILIES)
def test_related_families_equal_transformers(related: str, tmp_path: Path) -> None:
    folder = make_vision_checkpoint(related, tmp_path)
    loaded = load_model(ModelConfig(str(folder)), device=CPU)
    setup = SETUPS["chunks_of_7"]
    if related == "deepseek_ocr2":  # the images have up to 577 tokens
        setup = replace(setup, max_tokens=61)
    test_greedy_tokens_equal_transformers(setup, related, folder, loaded)
    test_checkpoints_tell_images_apart(related, folder)


def test_checkpoints_tell_images_apart(family: str, folder: Path) -> None:
    """A checkpoint that ignored its images would prove nothing."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    seen = []
    for number in range(8):
        row = Row(family, 0)
        image = random_image(family, number)
        row.images = [image]
        text = row.token_ids[row.token_ids >= 0]
        ids = np.insert(text, 5, np.full(image.num_tokens, IMAGE_TOKEN))
        row.token_ids = ids
        seen.append(reference_logits(model, row, ids)[-1])
    distances = torch.cdist(torch.stack(seen), torch.stack(seen))
    assert distances[~torch.eye(8, dtype=torch.bool)].min() > 0.1


def test_a_small_cache_encodes_images_again(family: str, loaded: LoadedModel) -> None:
    whole, _ = run_rows(loaded, Setup(), family, embeddings(loaded))
    small = embeddings(loaded, num_bytes=0)
    parts, encoded = run_rows(loaded, Setup(max_tokens=7, block_size=4), family, small)
    assert encoded > NUM_IMAGES
    assert tokens_of(whole) == tokens_of(parts)


def test_packed_images_have_the_same_embeddings(family: str, loaded: LoadedModel) -> None:
    tower = load_vision_tower(loaded.folder, loaded.pretrained, loaded.dtype, CPU)
    assert tower is not None
    images = [random_image(family, number) for number in range(6)]
    expected = torch.cat([tower([image.load_inputs()])[0] for image in images])
    ends = np.cumsum([image.num_tokens for image in images])
    indices = np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1])
    step = [StepImage(image, 0, at) for image, at in zip(images, indices, strict=True)]
    calls: list[object] = []
    tower.register_forward_hook(lambda *_: calls.append(None))
    packed = torch.zeros_like(expected)
    kept = ImageEmbeddings(tower, 2**20, decoder_layers_of(loaded.model), packs=True)
    kept.put(step, packed)
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-4)
    assert len(calls) < len(images)


def test_different_images_share_no_blocks(family: str, loaded: LoadedModel) -> None:
    """Equal images after equal tokens share their blocks."""
    if loaded.layout(16).slots_per_state:
        pytest.skip("recurrent models share only the prefixes that a job plans")
    setup = Setup(block_size=1, max_tokens=64)
    completions, _ = run_rows(loaded, setup, family, embeddings(loaded))
    cached = {number: done.stats.cached_tokens for number, done in completions.items()}
    one = random_image(family, 0).num_tokens
    assert cached[1] >= 5 + one  # the same image as row 0
    assert cached[3] == 5  # another image after the same text


def test_a_step_takes_a_whole_image(tmp_path: Path) -> None:
    """An image of Gemma 3 has more tokens than ``max_num_batched_tokens`` allows."""
    loaded = load_model(ModelConfig(str(make_vision_checkpoint("gemma3", tmp_path))), device=CPU)
    parts, _ = run_rows(loaded, Setup(max_tokens=2), "gemma3", embeddings(loaded))
    whole, _ = run_rows(loaded, Setup(), "gemma3", embeddings(loaded))
    assert tokens_of(parts) == tokens_of(whole)


@pytest.mark.long
@pytest.mark.parametrize("max_tokens", [1024, 4096])
def test_images_may_have_more_tokens_than_a_step_and_a_window(
    max_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4's processor makes up to 1,120 tokens; steps on a CPU and windows have 1,024."""
    folder = make_vision_checkpoint("gemma4", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].update(sliding_window=1024, max_position_embeddings=4096)
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("tests.worker.vision.test_images.random_image", image_of_1120_tokens)
    monkeypatch.setattr("tests.worker.vision.test_images.ROWS", ([0], [], [1], [0]))
    monkeypatch.setattr("tests.worker.vision.test_images.NUM_IMAGES", 2)
    loaded = load_model(ModelConfig(str(folder)), device=CPU)
    setup = Setup(block_size=16, pool_tokens=8192, max_tokens=max_tokens)
    test_greedy_tokens_equal_transformers(setup, "gemma4", folder, loaded)


def image_of_1120_tokens(family: str, number: int) -> Image:
    return image_of_patches(family, number, 32, 35)


def test_spans_of_an_image_with_text_inside() -> None:
    """Only adjacent tokens attend to each other, as in an image that Gemma 3 cuts into crops."""
    image = Image(0, dict, 5, attends_both_ways=True)
    placed = (PromptImage(image, np.array([2, 3, 6, 7, 8], np.int32)),)
    assert [last_cut(placed, stop) for stop in range(10)] == [0, 1, 2, 2, 4, 5, 6, 6, 6, 9]
    assert query_ends(placed, 0, 10).tolist() == [1, 2, 4, 4, 5, 6, 9, 9, 9, 10]
    assert query_ends(placed, 3, 9).tolist() == [4, 5, 6, 9, 9, 9]
    causal = (PromptImage(Image(0, dict, 5), placed[0].positions),)
    assert [last_cut(causal, stop) for stop in range(10)] == list(range(10))


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    gaps=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    cuts=st.lists(st.integers(0, 40)),
)
def test_chunks_of_a_prompt_hold_each_image_token_once(
    lengths: list[int], gaps: list[int], cuts: list[int]
) -> None:
    images, at = [], gaps[0]
    for number, length in enumerate(lengths):
        images.append(PromptImage(Image(number, dict, length), np.arange(at, at + length)))
        at += length + gaps[number + 1]
    bounds = sorted({0, at, *(cut for cut in cuts if cut < at)})
    found = [
        (each.image.number, each.first + k, int(position) + start - 100)
        for start, stop in pairwise(bounds)
        for each in images_of_chunk(tuple(images), start, stop, packed_start=100)
        for k, position in enumerate(each.indices)
    ]
    assert found == [
        (image.image.number, k, int(position))
        for image in images
        for k, position in enumerate(image.positions)
    ]
