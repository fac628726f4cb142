"""Counter-based random numbers: a sample's draw depends on its key and nothing else.

Philox-4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011): four 32-bit words of counter and two of key give four random words. Words are held in
int64 tensors, as torch has no unsigned arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer.engine.step import Int32, Int64, UInt64

RANDOM_BITS = 24
"""Bits in a draw: as many as a float32 in [0, 1) holds exactly."""

_ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox_4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Random words for every counter and key.

    Args:
        counter: int64 [4, ...], each a 32-bit word.
        key: int64 [2, ...], each a 32-bit word.

    Returns:
        int64 [4, ...], each a 32-bit word, on the device of ``counter``.
    """
    shape = (2,) + (1,) * (counter.ndim - 1)
    steps = torch.tensor(_KEY_STEPS, device=counter.device).view(shape)
    # Both multipliers are over 2**31: less 2**32 they are small enough for the product with a
    # word to fit in 63 bits, and what that leaves out of the high word is the word itself.
    multipliers = torch.tensor(_MULTIPLIERS, device=counter.device).view(shape) - 2**32
    multiplied, mixed = counter[[0, 2]], counter[[1, 3]]
    for _ in range(_ROUNDS):
        product = multiplied * multipliers
        high = (product >> 32) + multiplied
        multiplied = high.flip(0) ^ mixed ^ key
        mixed = (product & _WORD).flip(0)
        key = (key + steps) & _WORD
    return torch.stack((multiplied[0], mixed[0], multiplied[1], mixed[1]))


def random_bits(seed: UInt64, stream: UInt64, sample_index: Int32, position: Int32) -> Int64:
    """One uniform number in [0, 2**RANDOM_BITS) for each token to be drawn.

    The key is the seed, the counter is (stream low, stream high, sample index, position).

    Args:
        seed: [K].
        stream: [K] the row's random stream.
        sample_index: [K].
        position: [K] output tokens the sample had before this one.

    Returns:
        [K]; divided by 2**RANDOM_BITS they are uniform in [0, 1).
    """
    seeds, streams = (torch.from_numpy(words.view("int64")) for words in (seed, stream))
    indices, positions = (torch.from_numpy(words).long() for words in (sample_index, position))
    counter = torch.stack((streams & _WORD, (streams >> 32) & _WORD, indices, positions))
    key = torch.stack((seeds & _WORD, (seeds >> 32) & _WORD))
    bits: Int64 = (philox_4x32(counter, key)[0] >> (32 - RANDOM_BITS)).numpy()
    return bits
