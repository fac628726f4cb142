"""Defines the CPU benchmark's workloads: token ids with fixed output lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FIRST_ID, LAST_ID = 300, 8192  # ordinary tokens of the benchmark's vocabulary


@dataclass(frozen=True)
class Row:
    """A prompt, the number of output tokens, and the number of samples."""

    prompt: list[int]
    output_len: int
    n: int = 1


def workload(name: str, scale: float = 1.0) -> list[Row]:
    """Return the rows of W1 (mixed lengths), W2 (a shared prefix of 512 tokens), W3 (8 samples per
    row), or D1, D2 and so on (that number of rows that decode together).

    ``scale`` is the share of rows to return for W1 to W3, starting with the first row.
    """
    rng = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return rng.integers(FIRST_ID, LAST_ID, count).tolist()

    if name == "W1":
        count = max(1, int(256 * scale))
        prompt_lens, output_lens = rng.integers(16, 257, 256), rng.integers(16, 257, 256)
        lengths = zip(prompt_lens[:count].tolist(), output_lens[:count].tolist(), strict=True)
        return [Row(ids(prompt_len), output_len) for prompt_len, output_len in lengths]
    if name == "W2":
        prefix = ids(512)
        return [Row(prefix + ids(32), 64) for _ in range(max(1, int(128 * scale)))]
    if name == "W3":
        return [Row(ids(128), 64, n=8) for _ in range(max(1, int(32 * scale)))]
    if name[:1] == "D":
        return [Row(ids(16), 33) for _ in range(int(name[1:]))]
    raise ValueError(f"unknown workload {name!r}; choose W1, W2, W3, or D and a number")
