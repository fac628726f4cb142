"""Philox matches the known answers of the Random123 library; each part of the key matters."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.kernels.cpu import sampling
from batchinfer.worker.sampling.on_cpu import RANDOM_BITS, philox_4x32, random_bits

# Counter, key and output words of "philox4x32 10" in Random123's tests/kat_vectors
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(*texts: str) -> npt.NDArray[np.uint64]:
    """Parse hexadecimal words; return them as [words, texts]."""
    return np.array([[int(word, 16) for word in text.split()] for text in texts], np.uint64).T


def test_known_answers_alone_and_together() -> None:
    for counter, key, answer in KNOWN_ANSWERS:
        assert np.array_equal(philox_4x32(words(counter), words(key)), words(answer))
    counters, keys, answers = (words(*column) for column in zip(*KNOWN_ANSWERS, strict=True))
    assert np.array_equal(philox_4x32(counters, keys), answers)


def draw(seed: int, stream: int, sample_index: int, position: int) -> int:
    keys = np.array([seed], np.uint64), np.array([stream], np.uint64)
    places = np.array([sample_index], np.int32), np.array([position], np.int32)
    return int(random_bits(*keys, *places)[0])


def test_the_seed_is_the_philox_key_and_other_facts_the_counter() -> None:
    bits = draw(
        seed=0x299F31D0_A4093822, stream=0x85A308D3_243F6A88, sample_index=7, position=2**31 - 1
    )
    counter = words("243f6a88 85a308d3 00000007 7fffffff")
    (word,) = philox_4x32(counter, words("a4093822 299f31d0"))[0].tolist()
    assert bits == word >> (32 - RANDOM_BITS)


@pytest.mark.skipif(not cpu_attention.supports(torch.float32), reason="no C compiler")
def test_c_gives_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    seed, stream = rng.integers(0, 2**64, (2, 500), dtype=np.uint64)
    index, position = rng.integers(0, 2**31, (2, 500), dtype=np.int32)
    expected = random_bits(seed, stream, index, position)
    got = torch.empty(500, dtype=torch.int64)
    keys = (seed.view(np.int64), stream.view(np.int64), index, position)
    sampling.random_bits(*map(torch.from_numpy, keys), out=got)
    assert np.array_equal(got.numpy(), expected)


def test_every_part_of_the_key_changes_the_draw() -> None:
    draws = {draw(0, 0, 0, 0)}
    for part, high in enumerate((2**63, 2**63, 2**30, 2**30)):
        for value in (1, high):
            changed = [0, 0, 0, 0]
            changed[part] = value
            draws.add(draw(*changed))
    assert len(draws) == 9
