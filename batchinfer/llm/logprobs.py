"""Log-probabilities as vLLM returns them: in dicts keyed by token id, or in flat lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import overload

from batchinfer.engine.request import TokenLogprobs
from batchinfer.text.detokenize import MAX_CHAR_TOKENS, token_text
from batchinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token, with its rank (1 is most likely) and its text."""

    logprob: float
    rank: int | None = None
    """Rank of the token; None for a token that ``logprob_token_ids`` names."""
    decoded_token: str | None = None
    """Text that the token adds; the last token of a character adds the whole character. None with
    ``detokenize=False``."""


@dataclass
class FlatLogprobs(Sequence[dict[int, Logprob] | None]):
    """Log-probabilities of many positions, indexed like a list of dicts keyed by token id.

    A few long lists give the garbage collector less work than millions of dicts. The names are the
    same as in vLLM's class (vllm/logprobs.py). Position i has the entries from ``start_indices[i]``
    to ``end_indices[i]``; the first token of a prompt has no entries.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, position: Mapping[int, Logprob] | None) -> None:
        """Add the entries of the next position; None adds a position without entries."""
        entries = position or {}
        self.start_indices.append(len(self.token_ids))
        self.token_ids += entries
        self.logprobs += [entry.logprob for entry in entries.values()]
        self.ranks += [entry.rank for entry in entries.values()]
        self.decoded_tokens += [entry.decoded_token for entry in entries.values()]
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[Mapping[int, Logprob] | None]) -> None:
        """Add the entries of several positions."""
        for position in positions:
            self.append(position)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | FlatLogprobs:
        if isinstance(index, slice):
            part = FlatLogprobs()
            part.extend(self[at] for at in range(*index.indices(len(self))))
            return part
        span = range(self.start_indices[index], self.end_indices[index])
        return {
            self.token_ids[at]: Logprob(self.logprobs[at], self.ranks[at], self.decoded_tokens[at])
            for at in span
        }

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        return (self[at] for at in range(len(self)))


Logprobs = list[dict[int, Logprob]] | FlatLogprobs
"""One entry for each output token."""
PromptLogprobs = list[dict[int, Logprob] | None] | FlatLogprobs
"""One entry for each prompt token; None for the first token."""


def output_logprobs(
    tokens: Sequence[TokenLogprobs], text: list[int], tokenizer: Tokenizer | None, *, flat: bool
) -> Logprobs:
    """Return log-probabilities of each output token and of its most likely or requested
    alternatives.

    Args:
        text: token ids that end with the ids of ``tokens``; earlier ids are context for decoding.
        tokenizer: decodes tokens; None to leave texts out.
    """
    positions = _positions(tokens, text, tokenizer)
    return _flat(positions) if flat else list(positions)


def prompt_logprobs(
    tokens: Sequence[TokenLogprobs], prompt: list[int], tokenizer: Tokenizer | None, *, flat: bool
) -> PromptLogprobs:
    """Do the same as ``output_logprobs`` for a prompt's tokens; the first token has no entries.

    Args:
        tokens: tokens of the prompt, without the first token.
        prompt: ids of the whole prompt.
    """
    positions = chain([None], _positions(tokens, prompt, tokenizer))
    return _flat(positions) if flat else list(positions)


def _flat(positions: Iterable[Mapping[int, Logprob] | None]) -> FlatLogprobs:
    flat = FlatLogprobs()
    flat.extend(positions)
    return flat


def _positions(
    tokens: Sequence[TokenLogprobs], text: list[int], tokenizer: Tokenizer | None
) -> Iterator[dict[int, Logprob]]:
    first = len(text) - len(tokens)
    for at, token in enumerate(tokens, start=first):
        yield _entries(token, text[max(at - MAX_CHAR_TOKENS, 0) : at], tokenizer)


def _entries(
    token: TokenLogprobs, before: list[int], tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    entries: dict[int, tuple[float, int | None]] = {token.token_id: (token.logprob, token.rank)}
    entries |= {
        token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(token.top, start=1)
    }
    for token_id, logprob in token.named:
        entries.setdefault(token_id, (logprob, None))
    return {
        token_id: Logprob(
            logprob, rank, None if tokenizer is None else token_text(tokenizer, token_id, before)
        )
        for token_id, (logprob, rank) in entries.items()
    }
