"""Finds stop strings in the text of a sample while it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

from batchinfer.config import SamplingParams
from batchinfer.protocols import StopChecker, StopMatch
from batchinfer.text.detokenize import REPLACEMENT, IncrementalDetokenizer
from batchinfer.text.tokenizer import Tokenizer


class StopStringChecker:
    """Searches one sample for stop strings, which may span tokens.

    The match that ends first in the text wins; in a tie, the first of these strings in the list.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        *,
        include_stop_str_in_output: bool,
        skip_special_tokens: bool,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens
        )
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._overlap = max(map(len, self._stop)) - 1
        self._before = ""  # the end of the settled text, where a match may still begin
        self._before_start = 0  # position of ``_before`` in the text
        self._not_before = 0  # only matches that end after this position count

    def on_token(self, token_id: int, *, may_stop: bool) -> StopMatch | None:
        self._extend(self._detokenizer.push(token_id))
        text = self._before + self._detokenizer.tail
        if not may_stop:
            self._not_before = self._before_start + len(text.rstrip(REPLACEMENT))
            return None
        return self._find(text)

    def fork(self) -> StopStringChecker:
        forked = copy(self)
        forked._detokenizer = self._detokenizer.fork()
        return forked

    def _extend(self, settled: str) -> None:
        before = self._before + settled
        self._before = before[max(len(before) - self._overlap, 0) :]
        self._before_start += len(before) - len(self._before)

    def _find(self, text: str) -> StopMatch | None:
        best: tuple[int, str] | None = None
        for stop in self._stop:
            first = max(self._not_before + 1 - len(stop) - self._before_start, 0)
            start = text.find(stop, first)
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), stop)
        if best is None:
            return None
        end, stop = best
        return StopMatch(stop, self._before_start + end - (0 if self._include else len(stop)))


def make_stop_checker_factory(
    tokenizer: Tokenizer, params: SamplingParams
) -> Callable[[], StopChecker] | None:
    """Return a function that makes a sample's stop checker; None without stop strings."""
    if not params.stop:
        return None
    return lambda: StopStringChecker(
        tokenizer,
        params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )
