"""The sizes of CUDA graphs. Steps are padded to these sizes, so a few graphs serve almost all
steps.

Up to about 128 tokens, padding costs nothing, because reading the weights takes longer than the
arithmetic. Above 128 tokens, each size is an eighth to a quarter larger than the next smaller size.
In a mixed step, a padding sequence costs only a row of logits, so the numbers of sequences are
spaced farther apart than the numbers of tokens. In nine simulated jobs with 32 to 1,024 sequences,
0 to 10 % of the computed tokens were padding, and 96 to 100 % of the steps fit one of the sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal, NamedTuple

Kind = Literal["decode", "shared decode", "mixed"]
"""``decode``: one token per sequence; ``shared decode``: the same with shared prefixes; ``mixed``:
any other step."""

MAX_GRAPH_TOKENS = 8192
"""Largest number of tokens in a step with a graph. A larger step needs no graph, because the device
runs its kernels longer than the host takes to launch them."""

# Pairs (start, step): from `start` sequences on, sizes are `step` apart.
_DECODE_STEPS = ((64, 32), (256, 64))
_SMALL_TOKENS = (16, 32, 64, 128)
_SIZES_PER_OCTAVE = 4
# No graph has a number of tokens between 4,096 and the largest step. Such steps are rare, because
# the scheduler fills steps to the largest size while prompts wait. A graph would also save little
# time in these steps, because the device runs their kernels longer than the host takes to launch
# them.
_DENSE_TOKENS = 4096
_SEQUENCES_RATIO = 4
# In a small model, computing a row of logits takes about as long as running a token through the
# layers, so only a few rows may be padding.
_MAX_TOKENS_PER_SEQUENCE = 64
_MOST_PADDED = 1.25
# Limits on the chunks of a mixed step, above the number of chunks in any step of the simulated
# jobs. At most half of a launch's programs are idle.
_CHUNKS, _TOKENS_PER_CHUNK = 64, 32


class GraphSize(NamedTuple):
    kind: Kind
    tokens: int
    sequences: int

    @property
    def max_chunks(self) -> int:
        """Largest number of sequences in the step that may compute more than one token. Attention
        is launched for this number of chunks; unused programs cost a little time."""
        if self.kind != "mixed":
            return 0
        return min(self.sequences, max(_CHUNKS, self.tokens // _TOKENS_PER_CHUNK))


def all_sizes(max_num_seqs: int, max_tokens: int) -> list[GraphSize]:
    decodes = decode_sizes(min(max_num_seqs, max_tokens))
    sizes = [GraphSize("decode", size, size) for size in decodes]
    sizes += [GraphSize("shared decode", size, size) for size in decodes if size > 1]
    sizes += [
        GraphSize("mixed", tokens, sequences)
        for tokens in _mixed_tokens(max_tokens)
        for sequences in _mixed_sequences(tokens, max_num_seqs)
    ]
    return sorted(sizes, key=lambda size: (-size.tokens, -size.sequences, size.kind))


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return powers of two up to 64, multiples of 32 and then 64 above, and ``max_num_seqs``."""
    sizes = [1, 2, 4, 8, 16, 32, 64]
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + max(step for start, step in _DECODE_STEPS if sizes[-1] >= start))
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def _mixed_tokens(max_tokens: int) -> list[int]:
    sizes = list(_SMALL_TOKENS)
    while sizes[-1] < _DENSE_TOKENS:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + octave // _SIZES_PER_OCTAVE)
    largest = min(max_tokens, MAX_GRAPH_TOKENS)
    return [size for size in sizes if size < largest] + [largest]


def _mixed_sequences(tokens: int, max_num_seqs: int) -> list[int]:
    sizes = [max_num_seqs]
    while sizes[-1] > max(1, _SEQUENCES_RATIO * tokens // _MAX_TOKENS_PER_SEQUENCE):
        sizes.append(-(-sizes[-1] // _SEQUENCES_RATIO))
    # A step has at most as many sequences as tokens, so drop the sizes above the smallest one that
    # has room for that many.
    most = min(size for size in sizes if size >= min(tokens, max_num_seqs))
    return [size for size in sizes if size <= most]


class GraphSizes:
    def __init__(self, sizes: Iterable[GraphSize]) -> None:
        self._of_kind: dict[Kind, list[GraphSize]] = {}
        for size in sorted(sizes):
            self._of_kind.setdefault(size.kind, []).append(size)

    def least(self, kind: Kind, tokens: int, sequences: int) -> GraphSize | None:
        """Return the smallest size that is large enough for a step. Return None if no size is, or
        if too many of its tokens would be padding."""
        sizes = self._of_kind.get(kind, [])
        for size in sizes[bisect_left(sizes, (kind, tokens, sequences)) :]:
            if size.sequences >= sequences:
                wasted = size.tokens > max(_SMALL_TOKENS[-1], _MOST_PADDED * tokens)
                return None if wasted else size
        return None
