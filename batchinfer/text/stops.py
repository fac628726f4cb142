"""Stop strings: where a sample's text ends, found while it is being made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchinfer.config import SamplingParams
from batchinfer.protocols import StopChecker, StopMatch
from batchinfer.text.detokenize import REPLACEMENT, IncrementalDetokenizer
from batchinfer.text.tokenizer import TokenIds, Tokenizer


class StopStringChecker:
    """Watches one sample for its stop strings, which may straddle tokens.

    Of several matches the one that ends first in the text counts; of those that end together,
    the first in the list.
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
        self._before = ""  # the settled text's end, where a match can still begin
        self._before_start = 0  # its position in the text
        self._not_before = 0  # matches end after this position

    def on_token(self, token_id: int, *, may_stop: bool) -> StopMatch | None:
        """Take the sample's next token (see ``StopChecker``).

        ``text_end`` counts characters of ``output_text``'s text; the stop string is included in
        it if the output shall include it.
        """
        self._extend(self._detokenizer.push(token_id))
        text = self._before + self._detokenizer.tail
        if not may_stop:
            self._not_before = self._before_start + len(text.rstrip(REPLACEMENT))
            return None
        return self._find(text)

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
    """What makes a stop checker for each sample of a row; None without stop strings."""
    if not params.stop:
        return None
    return lambda: StopStringChecker(
        tokenizer,
        params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )


def output_text(
    tokenizer: Tokenizer,
    token_ids: Sequence[int] | TokenIds,
    stop_match: StopMatch | None,
    skip_special_tokens: bool,
    *,
    drop_last_token: bool = False,
) -> str:
    """A sample's text.

    Args:
        token_ids: all of the sample's tokens, the one that ended it included.
        stop_match: where a stop string ends the text, if one did.
        drop_last_token: the last token ended the sample (an end-of-sequence or stop token) and
            stop strings are not included: it has no part in the text, even if it is ordinary.
    """
    shown = token_ids[:-1] if drop_last_token else token_ids
    text = tokenizer.decode(shown, skip_special_tokens=skip_special_tokens)
    return text if stop_match is None else text[: stop_match.text_end]


def bad_words_token_ids(
    tokenizer: Tokenizer, bad_words: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """Token ids of each text in ``bad_words``, as at the start of a text and after a space.

    Like vLLM's; where the two differ in length both are banned (vLLM leaves out the second).
    """
    spellings = [space + word.lstrip() for word in bad_words for space in ("", " ")]
    encoded = tokenizer.encode_batch(spellings, add_special_tokens=False, parse_special_tokens=True)
    sequences = (tuple(ids.tolist()) for ids in encoded)
    return tuple(dict.fromkeys(ids for ids in sequences if ids))
