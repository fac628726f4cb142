"""Counter-based random numbers: a sample's draw depends only on its key and counter.

Philox-4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC
2011): a counter of four 32-bit words and a key of two words give four random words.
"""

from __future__ import annotations

import numpy as np

from batchinfer.engine.step import Int32, Int64, UInt64

RANDOM_BITS = 24
"""Bits of a draw: as many as a float32 in [0, 1) can hold exactly."""

_ROUNDS = 10
_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)


def philox_4x32(counter: UInt64, key: UInt64) -> UInt64:
    """Return random words [4, K] for counters [4, K] and keys [2, K]: 32-bit words, stored in 64
    bits."""
    left, right = counter[[0, 2]], counter[[1, 3]]
    for _ in range(_ROUNDS):
        product = (left * _MULTIPLIERS)[::-1]
        left, right = (product >> _WORD_BITS) ^ right ^ key, product & _WORD
        key = (key + _KEY_STEPS) & _WORD
    return np.stack((left[0], right[0], left[1], right[1]))


def random_bits(seed: UInt64, stream: UInt64, sample_index: Int32, position: Int32) -> Int64:
    """Return a uniform number in [0, 2**RANDOM_BITS) for each token to be drawn.

    The key is the seed, the counter is (stream low, stream high, sample index, position).

    Args:
        seed: [K].
        stream: [K] the row's random stream.
        sample_index: [K].
        position: [K] number of output tokens before this token.

    Returns:
        Numbers [K]; divided by 2**RANDOM_BITS, they are uniform in [0, 1).
    """
    places = sample_index.astype(np.uint64), position.astype(np.uint64)
    counter = np.stack((stream & _WORD, stream >> _WORD_BITS, *places))
    key = np.stack((seed & _WORD, seed >> _WORD_BITS))
    bits: UInt64 = philox_4x32(counter, key)[0] >> np.uint64(32 - RANDOM_BITS)
    return bits.astype(np.int64)
