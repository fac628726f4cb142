"""Sizes that steps are padded to, so that a few graphs serve all of them.

Up to about 128 tokens padding costs nothing, since reading the weights takes longer; beyond, sizes
are an eighth to a quarter apart. Sequences of a mixed step cost only their rows of logits, so their
sizes are further apart. (Over the steps of nine simulated jobs, with 32 to 1,024 sequences, 0 to
10 % of the tokens computed are padding, and 96 to 100 % of the steps have a size.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal, NamedTuple

Kind = Literal["decode", "shared decode", "mixed"]
"""One token per sequence; the same with shared prefixes; any other step."""

MAX_GRAPH_TOKENS = 8192
"""A larger step runs longer than the host takes to launch its kernels."""

# (first number of sequences, distance between sizes).
_DECODE_STEPS = ((64, 32), (256, 64))
_SMALL_TOKENS = (16, 32, 64, 128)
_SIZES_PER_OCTAVE = 4
# Between this many tokens and the largest step there is no size: such steps are rare (a scheduler
# fills the largest while prompts wait), and the device computes longer than the host needs.
_DENSE_TOKENS = 4096
_SEQUENCES_RATIO = 4
# In a small model, a row of logits costs about as much as a token, so few may be unused.
_MAX_TOKENS_PER_SEQUENCE = 64
_MOST_PADDED = 1.25
# More than in any step of the simulated jobs; at most half of a launch's programs are idle.
_CHUNKS, _TOKENS_PER_CHUNK = 64, 32


class GraphSize(NamedTuple):
    """A kind of step, and the numbers that it is padded to."""

    kind: Kind
    tokens: int
    sequences: int

    @property
    def max_chunks(self) -> int:
        """Most sequences of a step that compute several tokens: attention is launched for as many,
        and each missing one costs a little."""
        if self.kind != "mixed":
            return 0
        return min(self.sequences, max(_CHUNKS, self.tokens // _TOKENS_PER_CHUNK))


def all_sizes(max_num_seqs: int, max_tokens: int) -> list[GraphSize]:
    """The sizes to capture, the largest first."""
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
    """Powers of two to 64, then multiples of 32 and 64; the last is ``max_num_seqs``."""
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
    # Sizes with up to as many sequences as tokens.
    most = min(size for size in sizes if size >= min(tokens, max_num_seqs))
    return [size for size in sizes if size <= most]


class GraphSizes:
    """Finds the smallest of some sizes that holds a step."""

    def __init__(self, sizes: Iterable[GraphSize]) -> None:
        self._of_kind: dict[Kind, list[GraphSize]] = {}
        for size in sorted(sizes):
            self._of_kind.setdefault(size.kind, []).append(size)

    def least(self, kind: Kind, tokens: int, sequences: int) -> GraphSize | None:
        """The smallest size that holds a step; None if too much of it would be padding."""
        sizes = self._of_kind.get(kind, [])
        for size in sizes[bisect_left(sizes, (kind, tokens, sequences)) :]:
            if size.sequences >= sequences:
                wasted = size.tokens > max(_SMALL_TOKENS[-1], _MOST_PADDED * tokens)
                return None if wasted else size
        return None
