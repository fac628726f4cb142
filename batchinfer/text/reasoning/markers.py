"""Reasoning between a start and an end marker, like ``<think>`` and ``</think>``.

A marker that is an added token is found by its id, even if the text omits special tokens, and the
text of a row cannot imitate it. Other markers are found in the text, because a token may extend
beyond a marker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from batchinfer.text.detokenize import StopStringChecker
from batchinfer.text.reasoning.reasoning_format import Phase, SampleText, Split
from batchinfer.text.tokenizer import TokenIds, Tokenizer

_PROMPT_TAIL = 64
"""Number of tokens at the end of a prompt in which to search for the text of a marker."""
_SPACES = 8
"""Most whitespace tokens that a template writes after a marker."""


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a marker in a sample, in characters and in tokens."""

    begin: int
    end: int
    first_token: int
    after_token: int


class TokenMarker:
    """A marker that is an added token."""

    def __init__(self, token_id: int) -> None:
        self.token_ids = (token_id,)

    def find(self, sample: SampleText, after: Place | None) -> Place | None:
        """Return the marker's first place in a sample, or its first place after another marker."""
        places = np.flatnonzero(sample.token_ids == self.token_ids[0])
        places = places[places >= (0 if after is None else after.after_token)]
        if not len(places):
            return None
        at = int(places[0])
        return Place(sample.length_at(at), sample.length_at(at + 1), at, at + 1)

    def end_in_prompt(self, token_ids: TokenIds) -> int:
        """Return the number of tokens up to the end of the last marker in a prompt, or 0."""
        places = np.flatnonzero(token_ids == self.token_ids[0])
        return int(places[-1]) + 1 if len(places) else 0

    def watcher(self) -> Callable[[int], bool]:
        """Return a function of a sample's next token that returns True if the token ends the
        marker.
        """
        return lambda token_id: token_id == self.token_ids[0]


class TextMarker:
    """A marker that is ordinary text, with the methods of ``TokenMarker``.

    In a prompt, the marker counts only at the very end, because elsewhere it may be part of a
    user's text.
    """

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self._tokenizer = tokenizer
        self._text = text
        (ids,) = tokenizer.encode_batch([text], add_special_tokens=False, parse_special_tokens=True)
        self.token_ids = tuple(ids.tolist())

    def find(self, sample: SampleText, after: Place | None) -> Place | None:
        begin = sample.text.find(self._text, 0 if after is None else after.end)
        if begin < 0:
            return None
        end = begin + len(self._text)
        return Place(begin, end, sample.tokens_until(begin + 1) - 1, sample.tokens_until(end))

    def end_in_prompt(self, token_ids: TokenIds) -> int:
        tail = self._tokenizer.decode(token_ids[-_PROMPT_TAIL:], skip_special_tokens=False)
        return len(token_ids) if tail.rstrip().endswith(self._text.strip()) else 0

    def watcher(self) -> Callable[[int], bool]:
        checker = StopStringChecker(
            self._tokenizer,
            [self._text],
            include_stop_str_in_output=True,
            skip_special_tokens=False,
        )
        return lambda token_id: checker.on_token(token_id, may_stop=True) is not None


Marker = TokenMarker | TextMarker


class MarkerTracker:
    """Follows a sample, token by token."""

    def __init__(self, phase: Phase, start: Marker, end: Marker) -> None:
        self.phase = phase
        self.num_thinking = 0
        self._starts, self._ends = start.watcher(), end.watcher()

    def take(self, token_id: int) -> None:
        if self.phase is Phase.BEFORE and self._starts(token_id):
            self.phase = Phase.THINKING
        elif self.phase is not Phase.ANSWER:
            if self._ends(token_id):  # a start marker may be missing
                self.phase = Phase.ANSWER
            elif self.phase is Phase.THINKING:
                self.num_thinking += 1


class MarkerFormat:
    """Splits reasoning between two markers; the prompt may contain the first marker or both.

    As in vLLM's parsers for DeepSeek R1 and Qwen3 (vllm/reasoning/basic_parsers.py), an end marker
    without a start marker ends reasoning that began with the sample. Unlike in vLLM, a sample
    without markers is reasoning only if the prompt started the reasoning.

    Args:
        label: text after the start marker that is not part of the reasoning.
    """

    def __init__(self, tokenizer: Tokenizer, start: str, end: str, label: str = "") -> None:
        self._tokenizer = tokenizer
        self._start, self._end = _marker(tokenizer, start), _marker(tokenizer, end)
        self._label = label

    @property
    def start_token_ids(self) -> tuple[int, ...]:
        return self._start.token_ids

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        return self._end.token_ids

    def tracker(self, prompt_token_ids: TokenIds) -> MarkerTracker:
        return MarkerTracker(self._phase_after(prompt_token_ids), self._start, self._end)

    def split(self, prompt_token_ids: TokenIds, sample: SampleText) -> Split:
        phase = self._phase_after(prompt_token_ids)
        start = self._start.find(sample, None) if phase is Phase.BEFORE else None
        end = self._end.find(sample, start) if phase is not Phase.ANSWER else None
        if start is None and end is None and phase is not Phase.THINKING:
            return Split(None, sample.text, 0)
        text = sample.text
        before, begin, first = ("", 0, 0)
        if start is not None:
            before, begin, first = text[: start.begin], start.end, start.first_token
        stop, after, last = (
            (len(text), "", sample.num_tokens)
            if end is None
            else (end.begin, text[end.end :], end.after_token)
        )
        thought = text[begin:stop].removeprefix(self._label).strip()
        return Split(thought, (before + after).lstrip(), last - first)

    def without_reasoning(self, prompt_token_ids: TokenIds, sample: SampleText) -> str:
        return self.split(prompt_token_ids, sample).text

    def _phase_after(self, prompt: TokenIds) -> Phase:
        start, end = self._start.end_in_prompt(prompt), self._end.end_in_prompt(prompt)
        special = self._tokenizer.special_token_ids
        if start > end:
            # A special token after the marker starts another turn, so the marker is part of a
            # message.
            is_open = special.isdisjoint(prompt[start:].tolist())
            return Phase.THINKING if is_open else Phase.BEFORE
        rest = prompt[end:]
        if end and len(rest) <= _SPACES:
            text = self._tokenizer.decode(rest, skip_special_tokens=False)
            if not text.strip():
                return Phase.ANSWER
        return Phase.BEFORE


def _marker(tokenizer: Tokenizer, text: str) -> Marker:
    token_id = tokenizer.added_token_id(text)
    return TextMarker(tokenizer, text) if token_id is None else TokenMarker(token_id)
